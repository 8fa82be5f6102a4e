"""What is told once, in which order, and what is left for a repetition."""

from array import array

import pytest

from pagefleet.params import SamplingParams
from pagefleet.wire import Logprobs, Outputs, PromptOutput, Welcome, pack_floats
from pagefleet_scheduler.outbox import Outbox
from pagefleet_scheduler.sequence import Request, Sequence

EPOCH, GATEWAY = 7, b"g"


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(EPOCH)


def make_request() -> Request:
    params = SamplingParams(max_tokens=9, seed=1, prompt_logprobs=0)
    prompt = array("i", range(8))
    return Request("r", 1, GATEWAY, prompt, params, b"", 1, 10.0, began=12.5)


def news(outbox: Outbox) -> Outputs:
    (send,) = outbox.flush()
    assert isinstance(send.message, Outputs)
    return send.message


def test_logprobs_of_a_prompt_are_sent_once_and_without_a_gap(outbox: Outbox) -> None:
    """Pieces come again after a preemption, in other sizes."""
    request, sent = make_request(), list[PromptOutput]()
    for position, count in ((1, 3), (5, 2), (1, 2), (2, 3), (5, 3)):
        outbox.prompt_output(request, position, Logprobs(pack_floats([0.0] * count), b"", b""))
        sent += [piece for send in outbox.flush() for piece in send.message.prompts]  # type: ignore[union-attr]
    assert [(piece.position, len(piece.logprobs.chosen) // 4) for piece in sent] == [
        (1, 3),
        (2, 3),
        (5, 3),
    ]
    assert not request.wants_prompt_logprobs


def test_how_long_it_was_queued_is_said_with_the_first_tokens(outbox: Outbox) -> None:
    request = make_request()
    sequence = Sequence(request, [0], request.prompt + array("i", [50]))
    outbox.output(sequence, 0, 0)
    sequence.tokens.append(51)
    outbox.output(sequence, 0, 1)
    assert [item.queued for item in news(outbox).items] == [2_500_000, 0]


def test_news_of_a_request_go_before_word_that_it_is_not_known(outbox: Outbox) -> None:
    request = make_request()
    outbox.send(GATEWAY, Welcome(EPOCH, 1))
    outbox.output(Sequence(request, [0], request.prompt + array("i", [50])), 0, 0)
    first, second = [send.message for send in outbox.flush()]
    assert isinstance(first, Outputs)
    assert isinstance(second, Welcome)
    assert outbox.flush() == []
