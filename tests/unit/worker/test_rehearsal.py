"""A rehearsal runs on engines of all sizes, and leaves nothing behind."""

import random
from dataclasses import replace

import pytest

from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet_worker.loading import load_engine
from pagefleet_worker.rehearsal import rehearse
from tests.driver import Driver
from tests.gpu_twin import as_on_gpu

SETTINGS = WorkerSettings(num_blocks=40, max_num_seqs=24, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 7},
        {"num_blocks": 1},
        {"max_model_len": 7},
    ],
)
def test_a_stream_is_the_same_after_it(limits, prepared_model):
    engine = load_engine(prepared_model("llama"), replace(SETTINGS, **limits), lambda: None)
    params = SamplingParams(max_tokens=3, seed=random.randrange(2**32), logprobs=2)
    prompt = [1, 2, 3, 4]
    expected = Driver(engine).run([prompt], [params])[0]
    twin = as_on_gpu(engine, [1])
    rehearse(twin)
    found = Driver(twin).run([prompt], [params])[0]
    assert (found.output, found.logprobs) == (expected.output, expected.logprobs)
    assert not found.errors
