"""The same injuries with real models: SmolLM2, a small Llama with LoRA adapters, and one that keeps
keys and values in 8 bits and swaps them, compute bit for bit what they would have computed.
"""

import random

import pytest

from benchmarks.drill.questions import Questioner
from tests.faults.cell import make_cell
from tests.faults.conftest import Load, assert_exact, once, rehearse
from tests.faults.test_hang import run_with_stop
from tests.lora import with_adapters

pytestmark = pytest.mark.slow

FORMS = ("greedy", "seeded", "penalized", "n=2", "logprobs", "repeating", "beam")
EIGHT_BITS = ["--kv-cache-dtype=fp8", "--swap-space=1MiB", "--max-model-len=320"]


@pytest.fixture(scope="module", params=["SmolLM2", "LoRA adapters", "8 bits"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, request, tmp_path_factory, small_model, prepared_model):
    if kind == "SmolLM2":
        return request.getfixturevalue("smollm2")
    if kind == "8 bits":
        return prepared_model("llama")
    folder, _ = with_adapters(small_model("llama"), tmp_path_factory.mktemp("adapters"))
    return folder


@pytest.fixture(scope="module")
def real_cell(kind, tmp_path_factory, model):
    own = ["--num-blocks=22", *EIGHT_BITS] if kind == "8 bits" else ["--num-blocks=256"]
    cell = make_cell(
        tmp_path_factory.mktemp("real"),
        model,
        engine="torch",
        worker=["--threads=1", "--max-num-batched-tokens=64", *own],
        scheduler=["--worker-wait=120"],  # two that start at once on a busy machine
    )
    with cell.running():
        yield cell


@pytest.fixture
def cell(real_cell):
    yield real_cell
    real_cell.settle()


@pytest.fixture
def load(cell, model):
    seed = random.randrange(2**32)
    print("questions of seed", seed)
    load = Load(Questioner(model, seed), prompt=70, tokens=24, forms=FORMS)
    rehearse(cell, load)
    return load


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_worker_dies(cell, load, tokens):
    watch = once(lambda answer: answer.tokens >= tokens, cell.workers[0].kill)
    assert_exact(load.run(cell, watch))
    assert watch.struck


def test_both_workers_die(cell, load):
    """Nothing is left but the tokens that the gateway has."""
    watch = once(
        lambda answer: answer.tokens >= 6, lambda: [worker.restart() for worker in cell.workers]
    )
    assert_exact(load.run(cell, watch))
    assert watch.struck


def test_the_scheduler_dies(cell, load):
    watch = once(lambda answer: answer.tokens >= 6, cell.scheduler.restart)
    assert_exact(load.run(cell, watch))
    assert watch.struck


def test_a_worker_stops(cell, load):
    assert_exact(run_with_stop(cell, load, cell.workers[0], 4.0, tokens=4))
