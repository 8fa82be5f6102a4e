"""From what a step sampled to what a request gets: stop tokens, lengths, the fork into choices."""

from pagefleet.params import SamplingParams
from pagefleet.wire import Finish, Logprobs
from pagefleet_scheduler.sequence import Sequence


def finish_of(params: SamplingParams, outputs: int, last: int | None) -> Finish | None:
    """Why a choice with `outputs` tokens, the last of which is given, has ended; None: it goes on.

    Stop strings are the gateway's: it sees the text.
    """
    if last is not None and outputs >= params.min_tokens and params.ends(last):
        return Finish.STOP
    return Finish.LENGTH if outputs >= params.max_tokens else None


def append(sequence: Sequence, token: int, logprobs: Logprobs | None) -> None:
    """Give a sequence its next token, and end it if that was its last."""
    sequence.tokens.append(token)
    if logprobs is not None:
        sequence.logprobs.append(logprobs)
    sequence.finish = finish_of(sequence.request.params, sequence.outputs, token)


def fork(parent: Sequence) -> list[Sequence]:
    """The sequences of all choices that `parent` began; the parent itself becomes the first."""
    others = [parent.forked(choice) for choice in parent.choices[1:]]
    for other in others:
        if parent.answers(other.choices[0]):
            parent.request.sequences[other.choices[0]] = other
    del parent.choices[1:]
    return [parent, *others]


def concatenate(pieces: list[Logprobs]) -> Logprobs | None:
    """Logprobs of consecutive tokens as one."""
    if not pieces:
        return None
    return Logprobs(
        b"".join(piece.chosen for piece in pieces),
        b"".join(piece.top_ids for piece in pieces),
        b"".join(piece.top for piece in pieces),
    )
