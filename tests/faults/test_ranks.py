"""Workers of two ranks each: whichever process dies or stops, the streams go on, bit for bit, those
with LoRA adapters too.
"""

import os
import random
import signal
from pathlib import Path

import pytest

from benchmarks.drill.processes import is_alive
from benchmarks.drill.questions import Questioner
from tests.faults.cell import make_cell, wait_until
from tests.faults.conftest import Load, assert_exact, once, rehearse
from tests.lora import with_adapters

FORMS = ("greedy", "seeded", "penalized", "n=2", "logprobs", "repeating", "beam")


@pytest.fixture(scope="module")
def shared_ranks(tmp_path_factory, small_model):
    folder, _ = with_adapters(small_model("llama"), tmp_path_factory.mktemp("adapters"))
    cell = make_cell(
        tmp_path_factory.mktemp("ranks"),
        folder,
        engine="torch",
        worker=[
            *("--tensor-parallel-size=2", "--device=cpu", "--threads=2", "--max-model-len=256"),
            *("--num-blocks=64", "--max-num-batched-tokens=48"),
        ],
    )
    with cell.running():
        yield cell


@pytest.fixture
def cell(shared_ranks):
    yield shared_ranks
    shared_ranks.settle()


@pytest.fixture
def load(cell):
    """Prompts that no worker has seen, so that each gets some of them."""
    seed = random.randrange(2**32)
    print("questions of seed", seed)
    load = Load(Questioner(cell.model, seed), prompt=70, tokens=40, forms=FORMS)
    rehearse(cell, load)
    return load


def follower(worker):
    """The pid of the other rank of a worker."""
    [pid] = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    return int(pid)


def test_a_follower_dies(cell, load):
    """Its worker ends as a whole."""
    worker = cell.workers[0]
    watch = once(
        lambda answer: answer.tokens >= 10, lambda: os.kill(follower(worker), signal.SIGKILL)
    )
    assert_exact(load.run(cell, watch))
    assert watch.struck
    wait_until(lambda: not worker.alive)
    wait_until(lambda: worker.said("its rank 1 ended with status -9"))


@pytest.mark.slow
def test_rank_0_dies(cell, load):
    """Its followers do not outlive it."""
    worker = cell.workers[0]
    other = follower(worker)
    watch = once(lambda answer: answer.tokens >= 10, worker.kill)
    assert_exact(load.run(cell, watch))
    assert watch.struck
    wait_until(lambda: not is_alive(other))


@pytest.mark.slow
def test_all_workers_die(cell, load):
    watch = once(
        lambda answer: answer.tokens >= 10, lambda: [each.restart() for each in cell.workers]
    )
    assert_exact(load.run(cell, watch))
    assert watch.struck


@pytest.mark.slow
def test_a_follower_stops(cell, load):
    """Rank 0 waits for it in a sum, makes no progress, and is found out; then it gives up."""
    worker = cell.workers[0]
    other = follower(worker)
    watch = once(lambda answer: answer.tokens >= 1, lambda: os.kill(other, signal.SIGSTOP))
    assert_exact(load.run(cell, watch))
    assert watch.struck
    wait_until(lambda: not worker.alive)
    wait_until(lambda: not is_alive(other))


@pytest.mark.slow
def test_an_idle_follower_stops(cell, load):
    """Rank 0 says nothing more either: nobody asks its worker, which gives up in the end."""
    worker = cell.workers[0]
    other = follower(worker)
    os.kill(other, signal.SIGSTOP)
    wait_until(lambda: worker.said("shut out by the scheduler"))
    assert_exact(load.run(cell))
    wait_until(lambda: not worker.alive)
    wait_until(lambda: not is_alive(other))


@pytest.mark.slow
def test_rank_0_leaves_and_takes_its_followers_with_it(cell):
    worker = cell.workers[0]
    other = follower(worker)
    worker.leave()
    wait_until(lambda: not is_alive(other))
