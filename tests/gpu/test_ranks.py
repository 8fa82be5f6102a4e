"""Several GPUs that share a model and its adapters give what one CPU gives, and their steps wait
for nothing. Needs two GPUs, or pretends to have them.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagefleet.tether import tethered
from pagefleet_worker import group as groups
from pagefleet_worker.group import load_group
from pagefleet_worker.loading import load_engine
from pagefleet_worker.prepare import prepare
from tests.gpu.engines import no_waiting, require_gpu_or_interpreter
from tests.gpu.test_steps import CPU, GPU, streams_of, values
from tests.lora import KINDS, with_adapters
from tests.models import make_model

require_gpu_or_interpreter()
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs")

PRETENDED = not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def followers_pretend(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the process of the test does."""
    names = {"pagefleet_worker.follower": "tests.gpu.pretended_follower"} if PRETENDED else {}
    monkeypatch.setattr(
        groups, "tethered", lambda command: tethered([names.get(each, each) for each in command])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("invariant", "adapters"), [(False, len(KINDS)), (True, 0)])
def test_streams_are_those_of_a_cpu(
    invariant: bool, adapters: int, tmp_path: Path, generator: random.Random
) -> None:
    """From graphs too, and whether the ranks add up by themselves or have it done."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model("mistral", tmp_path / "whole", **sizes)
    folder = with_adapters(model, tmp_path)[0] if adapters else prepare(str(model), tmp_path)
    settings = replace(GPU, tensor_parallel_size=2, batch_invariant=invariant)
    seed, group = generator.random(), load_group(folder, settings, lambda: None, lambda *_: None)
    try:
        with no_waiting():
            found = streams_of(group, random.Random(seed), adapters)
    finally:
        group.close()
    expected = streams_of(load_engine(folder, CPU, lambda: None), random.Random(seed), adapters)
    for stream, right in zip(found, expected, strict=True):
        assert (stream.output, stream.errors) == (right.output, right.errors)
        assert values(stream) == pytest.approx(values(right), abs=1e-4)
