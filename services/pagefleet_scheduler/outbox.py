"""What the scheduler is about to send: news of sequences by gateway, everything else in order."""

from collections import defaultdict
from dataclasses import dataclass

from pagefleet.wire import (
    Finish,
    Floats,
    Logprobs,
    Message,
    Output,
    Outputs,
    PromptOutput,
    Reason,
    Rejected,
    pack_ints,
)
from pagefleet_scheduler import decoding
from pagefleet_scheduler.beam import Answer
from pagefleet_scheduler.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class Send:
    """A message for a peer."""

    peer: bytes
    message: Message


class Outbox:
    """Collects messages while events are handled; `flush` returns them."""

    def __init__(self, epoch: int) -> None:
        self._sends: list[Send] = []
        self._news = defaultdict[bytes, Outputs](lambda: Outputs(epoch, []))

    def send(self, peer: bytes, message: Message) -> None:
        """Send a message by itself."""
        self._sends.append(Send(peer, message))

    def reject(self, request: Request, reason: Reason, text: str, param: str | None = None) -> None:
        """Tell a request's gateway that it ends here."""
        self.send(request.gateway, Rejected(request.id, request.attempt, reason, text, param))

    def output(
        self, sequence: Sequence, choice: int, position: int, embedding: Floats | None = None
    ) -> None:
        """Send what a choice has from `position` on, and whether it has ended."""
        request = sequence.request
        tokens = sequence.tokens[len(request.prompt) + position :]
        logprobs = None
        if sequence.logprobs:
            logprobs = decoding.concatenate(sequence.logprobs[position - sequence.base :])
        self._news[request.gateway].items.append(
            Output(
                request=request.id,
                attempt=request.attempt,
                choice=choice,
                position=position,
                tokens=pack_ints(tokens),
                logprobs=logprobs,
                finish=sequence.finish,
                cached=sequence.cached,
                queued=0 if position else request.queued,
                numerics=sequence.numerics,
                embedding=embedding,
            )
        )
        sequence.sent = position + len(tokens)

    def answer(self, request: Request, choice: int, answer: Answer, cached: int) -> None:
        """Send an answer of a beam search, whole."""
        self._news[request.gateway].items.append(
            Output(
                request=request.id,
                attempt=request.attempt,
                choice=choice,
                position=0,
                tokens=pack_ints(answer.tokens),
                logprobs=decoding.concatenate(answer.logprobs),
                finish=answer.finish,
                cached=cached,
                score=answer.score,
                queued=request.queued,
            )
        )

    def no_answer(self, request: Request, choice: int, finish: Finish) -> None:
        """Say that a beam search ended without an answer for a choice."""
        self._news[request.gateway].items.append(
            Output(request.id, request.attempt, choice, position=0, tokens=b"", finish=finish)
        )

    def prompt_output(self, request: Request, position: int, logprobs: Logprobs) -> None:
        """Send logprobs of a piece of a prompt, unless they were sent before."""
        end = position + len(logprobs.chosen) // 4
        if position <= request.prompt_logprobs_sent < end:
            request.prompt_logprobs_sent = end
            self._news[request.gateway].prompts.append(
                PromptOutput(request.id, request.attempt, position, logprobs)
            )

    def flush(self) -> list[Send]:
        """Everything that was collected. The news come first, so that a gateway hears how a request
        ended before it hears that it is not known any more.
        """
        sends = [Send(peer, outputs) for peer, outputs in self._news.items()] + self._sends
        self._news.clear()
        self._sends.clear()
        return sends
