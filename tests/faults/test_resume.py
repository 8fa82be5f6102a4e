"""A stream goes on at another gateway after its own was killed: nothing lost, nothing repeated."""

import threading

import pytest

from benchmarks.drill.questions import SAMPLED
from tests.faults.cell import PATIENCE, wait_until
from tests.faults.conftest import kill_gateway_at
from tests.faults.proxy import Action
from tests.streams import read


@pytest.mark.parametrize("form", SAMPLED)
def test_a_stream_goes_on_at_another_gateway(cell, questions, form):
    question = questions.ask(form, 40, 40)
    first, last_id, ended = read(cell.servers[0], question, watch=kill_gateway_at(cell, 6))
    assert ended is None
    rest, _, ended = read(cell.servers[1], question, last_id)
    assert ended == "[DONE]"
    cell.gateways[0].restart()
    assert [first[index] + rest[index] for index in range(question.choices)] == question.expected


@pytest.mark.parametrize("form", SAMPLED)
def test_a_stream_that_is_open_still_moves(cell, questions, form):
    """Its old gateway is told, and says so to whoever may read there."""
    question = questions.ask(form, 40, 60)
    rests, moved = [], threading.Event()
    cell.gateway_proxy.act("Submit", Action.PASS, first=2, call=lambda link: moved.set())
    # The result behind the first six tokens waits for that.
    cell.worker_proxy.act("Result", Action.PASS, first=8, call=lambda link: moved.wait(PATIENCE))

    def go_on_elsewhere(count, last_id):
        if count >= 5 and not thread.is_alive() and not rests:
            rests.append(last_id)
            thread.start()

    def read_the_rest():
        rests.append(read(cell.servers[1], question, rests[0]))

    thread = threading.Thread(target=read_the_rest)
    first, _, ended = read(cell.servers[0], question, watch=go_on_elsewhere)
    thread.join()
    assert ended == "stream_moved"
    assert wait_until(lambda: cell.total("pagefleet_streams_moved_total", gateway=1)) >= 1
    at, (rest, _, ended) = rests
    assert ended == "[DONE]"
    counts = [int(each.partition(":")[0]) for each in at.partition(".")[2].split("-")]
    for index, count in enumerate(counts):
        assert first[index][:count] + rest[index] == question.expected[index]
        assert first[index] == question.expected[index][: len(first[index])]
