"""Links that stand still, both ways or one way: between services, and to a client.

Services of one machine talk over Unix sockets, which no network namespace parts, so the proxy
stalls them; the client's link is a real one, taken down. For those between machines there is
test_machines.py.
"""

import asyncio
import threading

import pytest

from tests.faults.cell import make_cell
from tests.faults.conftest import Load, assert_exact, once
from tests.faults.namespace import Namespace

WAYS = [("up", "down"), ("up",), ("down",)]


def run_stalled(cell, load, proxy, ways, seconds):
    """Stall a proxy under a load, when the first of its streams has ten tokens."""

    async def stall():
        await begun.wait()
        with proxy.stalled(*ways):
            await asyncio.sleep(seconds)
        for worker in cell.workers:
            if not worker.alive:  # it was fenced, and found no way back
                worker.restart()

    begun, held = asyncio.Event(), proxy.held
    watch = once(lambda answer: answer.tokens >= 10, begun.set)
    answers = load.run(cell, watch, stall())
    assert watch.struck
    assert proxy.held > held
    return answers


@pytest.mark.parametrize(
    "ways", [WAYS[0], *(pytest.param(w, marks=pytest.mark.slow) for w in WAYS[1:])]
)
@pytest.mark.parametrize(
    "seconds", [0.3, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 20))]
)
@pytest.mark.parametrize("side", ["gateway_proxy", "worker_proxy"])
def test_between_services(cell, questions, side, ways, seconds):
    load = Load(questions, tokens=60 if seconds < 1 else 300)
    assert_exact(run_stalled(cell, load, getattr(cell, side), ways, seconds))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["unplug", "lose"])
@pytest.mark.parametrize("seconds", [0.2, 2, 20])
def test_to_a_client(tmp_path, echo_folder, questions, seconds, way):
    with Namespace().made() as namespace:
        worker = ["--step-seconds=0.01"]
        cell = make_cell(tmp_path, echo_folder, workers=1, worker=worker, host=namespace.address)

        def ask():
            trouble = threading.Thread(target=getattr(namespace, way), args=[seconds])
            watch = once(lambda answer: answer.tokens >= 10, trouble.start)
            return Load(questions, tokens=100).run(cell, watch)

        with cell.running():
            answers = namespace.run(ask)
            assert_exact(answers)
            assert max(answer.longest_gap for answer in answers) > seconds / 2
            cell.settle()


@pytest.mark.slow
def test_to_a_client_at_a_megabit(tmp_path, echo_folder, questions):
    """The streams want more than the link can carry: they wait for it, whole and unchanged."""
    with Namespace().made() as namespace, namespace.slowed("1mbit"):
        cell = make_cell(tmp_path, echo_folder, workers=1, host=namespace.address)
        with cell.running():
            answers = namespace.run(lambda: Load(questions, tokens=800).run(cell))
            assert_exact(answers)
            cell.settle()
