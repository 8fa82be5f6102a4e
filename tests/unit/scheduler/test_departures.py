"""What is kept of streams whose reader has gone: for whom, how long, and how much."""

import random
from array import array
from collections.abc import Callable

import msgspec
import pytest

from pagefleet.params import SamplingParams
from pagefleet.wire import Finish, Logprobs, pack_floats
from pagefleet_scheduler import departures
from pagefleet_scheduler.departures import KEEP_SECONDS, Departures, can_move
from pagefleet_scheduler.sequence import Request, Sequence

PARAMS = SamplingParams(max_tokens=30, seed=1)


def make_request(id: str = "r", *outputs: int, window: int = 9, salt: bytes = b"t") -> Request:
    """With a choice for each number of outputs; the last has ended."""
    prompt = array("i", [1, 2, 3])
    request = Request(id, 1, b"g", prompt, PARAMS, salt, 1, 0.0, window=window)
    for choice, count in enumerate(outputs):
        tokens = prompt + array("i", range(count))
        request.sequences[choice] = Sequence(request, [choice], tokens)
    if outputs:
        request.sequences[len(outputs) - 1].finish = Finish.LENGTH
        request.end(len(outputs) - 1)
    return request


def test_outputs_are_kept_for_whoever_asks_the_same_again() -> None:
    kept = Departures()
    request = make_request("r", 4, 0, 7)
    kept.keep(request, 0.0)
    request.sequences[0].tokens.append(99)
    kept.expire(KEEP_SECONDS - 0.1)
    found = kept.take("r", make_request("other"))
    assert [(each.choices, each.outputs, each.finish) for each in found] == [
        ([2], 7, Finish.LENGTH),
        ([0], 4, None),
    ]
    assert kept.take("r", make_request()) == []
    kept.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda request: setattr(request, "salt", b"another tenant"),
        lambda request: setattr(request, "prompt", array("i", [1, 2, 4])),
        lambda request: setattr(request, "params", msgspec.structs.replace(PARAMS, seed=2)),
    ],
    ids=["salt", "prompt", "params"],
)
def test_nobody_else_gets_them(change: Callable[[Request], None]) -> None:
    kept = Departures()
    kept.keep(make_request("r", 4, 4), 0.0)
    other = make_request("other")
    change(other)
    assert kept.take("r", other) == []
    assert not can_move(make_request("r", 4, 4), other, {0})
    assert len(kept.take("r", make_request())) == 2


def test_only_an_open_stream_that_has_all_choices_can_move() -> None:
    assert can_move(make_request("r", 4, 4), make_request("other"), {0, 1})
    assert not can_move(make_request("r", 4, 4), make_request("other"), {0, 2})


def test_what_is_too_old_is_forgotten() -> None:
    kept = Departures()
    kept.keep(make_request("r", 4, 4), 0.0)
    kept.move("old", "new", 0.0)
    kept.keep(make_request("late", 4, 4), 1.0)
    kept.expire(KEEP_SECONDS - 0.1)
    assert kept.has_moved("old")
    kept.expire(KEEP_SECONDS)
    assert kept.take("r", make_request()) == []
    assert kept.take("late", make_request())
    assert not kept.has_moved("old")
    kept.check()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "KEPT_TOKENS", 1000)
    seed = random.randrange(2**32)
    draw, kept = random.Random(seed), Departures()
    for number in range(200):
        kept.keep(make_request(f"r{number}", draw.randint(1, 200), draw.randint(1, 200)), 0.0)
        kept.check()
    assert kept.take("r199", make_request()), seed
    assert not kept.take("r0", make_request())


def test_what_no_stream_can_be_made_of_is_not_kept() -> None:
    plain, prompt_only = make_request("plain", 4, 4, window=0), make_request("prompt", 4, 4)
    prompt_only.params = msgspec.structs.replace(PARAMS, prompt_logprobs=1)
    resumed = make_request("resumed", 4, 4)
    resumed.params = msgspec.structs.replace(PARAMS, logprobs=1)
    resumed.sequences[0].base = 2
    kept = Departures()
    for request in (plain, prompt_only, resumed, make_request("new", 0)):
        kept.keep(request, 0.0)
        assert kept.take(request.id, request) == []


def test_a_stream_that_was_resumed_is_kept_unless_logprobs_are_missing() -> None:
    request = make_request("r", 4, 4)
    request.sequences[0].base = 2
    kept = Departures()
    kept.keep(request, 0.0)
    assert len(kept.take("r", request)) == 2


def test_logprobs_are_kept_with_their_tokens() -> None:
    request = make_request("r", 1, 1)
    piece = Logprobs(pack_floats([0.5]), b"", b"")
    request.sequences[0].logprobs.append(piece)
    kept = Departures()
    kept.keep(request, 0.0)
    assert [each.logprobs for each in kept.take("r", request)] == [[], [piece]]


def test_moves_are_followed() -> None:
    kept = Departures()
    kept.move("a", "b", 0.0)
    kept.move("b", "c", 1.0)
    assert kept.latest("a") == "c"
    assert kept.has_moved("b")
    assert not kept.has_moved("c")
    kept.check()
