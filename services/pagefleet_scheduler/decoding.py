"""How sequences take the tokens that a step sampled: where they end, and fork."""

from array import array

from pagefleet.params import SamplingParams
from pagefleet.wire import Finish, Logprobs
from pagefleet_scheduler.beam import Continuation
from pagefleet_scheduler.sequence import Request, Sequence


def finish_of(params: SamplingParams, outputs: int, last: int) -> Finish | None:
    """Why a choice with `outputs` tokens, of which `last` is the last, has ended; None: it goes on.

    Stop strings are the gateway's part, which sees the text.
    """
    if outputs >= params.min_tokens and params.ends(last):
        return Finish.STOP
    return Finish.LENGTH if outputs >= params.max_tokens else None


def extend(sequence: Sequence, tokens: "array[int]", logprobs: list[Logprobs | None]) -> None:
    """Give a sequence its next tokens, up to the one that ends it."""
    params, outputs = sequence.request.params, sequence.outputs
    for number, token in enumerate(tokens):
        outputs += 1
        sequence.tokens.append(token)
        if (piece := logprobs[number]) is not None:
            sequence.logprobs.append(piece)
        sequence.finish = finish_of(params, outputs, token)
        if sequence.finish is not None:
            return


def fork(parent: Sequence) -> list[Sequence]:
    """The sequences of all choices that `parent` began; the parent itself becomes the first."""
    others = [parent.forked(choice) for choice in parent.choices[1:]]
    for other in others:
        if parent.answers(other.choices[0]):
            parent.request.sequences[other.choices[0]] = other
    del parent.choices[1:]
    return [parent, *others]


def fork_beams(
    request: Request, beams: list[Sequence], going: list[Continuation]
) -> list[list[Sequence]]:
    """Make the continuations, in their order, the request's beams.

    Returns lists of those that share blocks: a beam that was there before, and its forks.
    """
    number = max(request.sequences) + 1
    request.sequences = {}
    families: dict[int, list[Sequence]] = {}
    for continuation in going:
        family = families.setdefault(continuation.beam, [])
        beam = beams[continuation.beam]
        if family:
            beam, number = beam.forked(number), number + 1
        family.append(beam)
        request.sequences[beam.choices[0]] = beam
    return list(families.values())


def append_continuations(request: Request, going: list[Continuation]) -> None:
    """Give each beam of a search the token of its continuation; both are in the same order."""
    for beam, continuation in zip(request.sequences.values(), going, strict=True):
        beam.candidates = None
        beam.tokens.append(continuation.token)
        if continuation.logprobs is not None:
            beam.logprobs.append(continuation.logprobs)


def concatenate(pieces: list[Logprobs]) -> Logprobs | None:
    """Logprobs of consecutive tokens as one; None if there are none."""
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    return Logprobs(
        b"".join(piece.chosen for piece in pieces),
        b"".join(piece.top_ids for piece in pieces),
        b"".join(piece.top for piece in pieces),
    )
