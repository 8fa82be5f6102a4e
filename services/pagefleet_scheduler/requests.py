"""The life of a request: how it becomes sequences, and how results move these on to their ends.

All choices of a request that have no token yet share one sequence, which forks at its first sample;
a choice that comes with tokens, after a fault, is a sequence of its own that goes on from them. A
beam search begins with one beam, from the prompt, and answers all its choices when it ends; without
tokens to generate there is nothing to search, and its choices are treated as samples.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator

from pagefleet.wire import ChoiceState, Finish, Floats, Logprobs, Reason, unpack_ints
from pagefleet_scheduler import decoding
from pagefleet_scheduler.beam import BeamSearch
from pagefleet_scheduler.flights import Accepted, Sampled
from pagefleet_scheduler.outbox import Outbox
from pagefleet_scheduler.placement import Placement
from pagefleet_scheduler.queue import OUTPUT_COST
from pagefleet_scheduler.sequence import Request, Sequence


class Requests:
    """All requests that have not ended."""

    def __init__(self, placement: Placement, outbox: Outbox) -> None:
        self._placement = placement
        self._outbox = outbox
        self._open: dict[str, Request] = {}
        self._of: defaultdict[bytes, dict[str, Request]] = defaultdict(dict)
        """The same requests by their gateways, whose beats compare them five times a second."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._open.values()))

    def __contains__(self, request: Request) -> bool:
        return self._open.get(request.id) is request

    def get(self, id: str) -> Request | None:
        """The request with that id, unless it has ended."""
        return self._open.get(id)

    def of(self, gateway: bytes) -> list[Request]:
        """The requests that a gateway has open."""
        return list(self._of.get(gateway, {}).values())

    def check(self) -> None:
        """Assert the invariants: each can go on, and is listed once, under its gateway."""
        assert all(request.sequences for request in self)
        assert all(self._of.values())
        listed = [(gateway, each) for gateway, held in self._of.items() for each in held.values()]
        assert all(request.gateway == gateway for gateway, request in listed)
        assert {id(request) for _, request in listed} == {id(request) for request in self}
        assert len(listed) == len(self)

    # --- their beginning and their end ----------------------------------------------------------

    def begin(
        self, request: Request, choices: list[ChoiceState], known: Iterable[Sequence] = ()
    ) -> None:
        """Take a request in.

        Args:
            request: is not open yet.
            choices: what its gateway has received of each.
            known: sequences of one choice each that were kept from an earlier request, and of
                which this gateway has received nothing.
        """
        self._add(request)
        wanted = {choice.index: choice for choice in choices if not choice.finished}
        if request.params.beam_width and request.params.max_tokens:
            self._begin_search(request, choices)
        else:
            for sequence in known:
                if wanted.pop(sequence.choices[0], None):
                    self._take_back(request, sequence)
            self._begin_choices(request, list(wanted.values()))
        self._end_if_finished(request)

    def hand_over(self, request: Request, to: Request, choices: set[int]) -> None:
        """Let an open request go on as `to`, whose gateway has nothing yet and wants `choices`."""
        self._remove(request)
        request.id, request.attempt, request.gateway = to.id, to.attempt, to.gateway
        request.window, request.deadline = to.window, to.deadline
        self._add(request)
        if request.search is None:
            for choice, sequence in (request.finished | request.sequences).items():
                self._send_whole(request, sequence, choice)
        unwanted = (request.answers or request.sequences).keys() - choices
        if unwanted:
            self.abort(request, list(unwanted))

    def _take_back(self, request: Request, sequence: Sequence) -> None:
        sequence.request, choice = request, sequence.choices[0]
        self._send_whole(request, sequence, choice)
        if sequence.finish is None:
            request.sequences[choice] = sequence
            self._placement.waiting.add(sequence)
        else:
            request.finished[choice] = sequence

    def _send_whole(self, request: Request, sequence: Sequence, choice: int) -> None:
        sequence.base = sequence.sent_before = 0
        sequence.allow(request.window or None)
        if sequence.outputs or sequence.finish is not None:
            self._outbox.output(sequence, choice, 0)

    def _begin_search(self, request: Request, choices: list[ChoiceState]) -> None:
        request.answers = {
            choice.index: rank for rank, choice in enumerate(choices) if not choice.finished
        }
        if request.answers:
            request.search = BeamSearch(request.params)
            request.sequences[0] = Sequence(request, [0], request.prompt[:])
            self._placement.waiting.add(request.sequences[0])

    def _begin_choices(self, request: Request, choices: list[ChoiceState]) -> None:
        fresh = {choice.index: choice.numerics for choice in choices if not choice.tokens}
        if fresh:
            sequence = Sequence(request, list(fresh), request.prompt[:])
            sequence.numerics = next(filter(None, fresh.values()), 0)
            sequence.allow(request.window or None)
            request.sequences |= dict.fromkeys(fresh, sequence)
            self._placement.waiting.add(sequence)
        for choice in choices:
            if choice.tokens:
                self._resume(request, choice)

    def _resume(self, request: Request, choice: ChoiceState) -> None:
        outputs = unpack_ints(choice.tokens)
        sequence = Sequence(request, [choice.index], request.prompt + outputs)
        sequence.base = sequence.sent = sequence.sent_before = len(outputs)
        sequence.numerics = choice.numerics
        sequence.allow(len(outputs) + request.window if request.window else None)
        sequence.finish = decoding.finish_of(request.params, len(outputs), outputs[-1])
        request.sequences[choice.index] = sequence
        if sequence.finish is None:
            self._placement.waiting.add(sequence)
        else:
            self._outbox.output(sequence, choice.index, len(outputs))
            request.end(choice.index)

    def refuse(self, request: Request, reason: Reason, text: str, param: str | None = None) -> None:
        """End a request, and tell its gateway why."""
        self._outbox.reject(request, reason, text, param)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Drop a request and all of its sequences without a word to its gateway."""
        for sequence in dict.fromkeys(request.sequences.values()):
            self._drop(sequence)
        request.sequences.clear()
        self._end_if_finished(request)

    def allow(self, request: Request, limits: dict[int, int]) -> None:
        """Let choices have more outputs; what was allowed before stays allowed."""
        for choice, limit in limits.items():
            sequence = request.sequences.get(choice)
            if sequence is not None and sequence.allowed is not None:
                sequence.allow(max(sequence.allowed, limit))

    def time_out(self, request: Request) -> None:
        """End all choices of a request whose deadline has passed."""
        for choice, sequence in request.sequences.items():
            if request.search is None:
                sequence.finish = Finish.TIMEOUT
                self._outbox.output(sequence, choice, sequence.sent)
        for choice in request.answers:
            self._outbox.no_answer(request, choice, Finish.TIMEOUT)
        self.forget(request)

    def abort(self, request: Request, choices: list[int]) -> None:
        """End these choices, or all if none is named; a search runs on for those that are left."""
        if request.search is not None:
            for choice in choices or list(request.answers):
                request.answers.pop(choice, None)
            if not request.answers:
                self.forget(request)
            return
        for choice in choices or list(request.sequences):
            sequence = request.sequences.pop(choice, None)
            if sequence is not None and not any(map(sequence.answers, sequence.choices)):
                self._drop(sequence)
        self._end_if_finished(request)

    def _drop(self, sequence: Sequence) -> None:
        sequence.finish = Finish.ABORT
        self._placement.stop(sequence)

    def _end_if_finished(self, request: Request) -> None:
        if not request.sequences and request in self:
            self._remove(request)

    def _add(self, request: Request) -> None:
        self._open[request.id] = self._of[request.gateway][request.id] = request

    def _remove(self, request: Request) -> None:
        del self._open[request.id], self._of[request.gateway][request.id]
        if not self._of[request.gateway]:
            del self._of[request.gateway]

    # --- what steps give ------------------------------------------------------------------------

    def accept(self, accepted: Accepted) -> None:
        """Move sequences on by what a step gave them."""
        for sequence, text in accepted.failed:
            request = sequence.request
            if request in self:
                reason = Reason.INVALID if request.params.confines else Reason.FAILED
                self.refuse(request, reason, text)
        for sequence, piece in accepted.prompts:
            if sequence.request in self:
                self._outbox.prompt_output(sequence.request, piece.position, piece.logprobs)
        for sampled in accepted.sampled:
            sequence, request = sampled.sequence, sampled.sequence.request
            self._placement.waiting.charge(request, OUTPUT_COST * len(sampled.tokens))
            if sequence.finish is not None:
                continue
            if request.search is not None:
                self._candidates(sequence, request.search, sampled.logprobs[0])
            elif len(sequence.choices) > 1:
                self._fork(sampled)
            else:
                self._extend(sequence, sampled.tokens, sampled.logprobs)
        for sequence, embedding in accepted.completed.items():
            self._completed(sequence, embedding)

    def _fork(self, sampled: Sampled) -> None:
        """Give each choice that shares the sequence its first token, and its own sequence."""
        sequences = decoding.fork(sampled.sequence)
        self._placement.share(sequences)
        for number, sequence in enumerate(sequences):
            if not sequence.answers(sequence.choices[0]):
                self._drop(sequence)
                continue
            part = slice(number, number + 1)
            self._extend(sequence, sampled.tokens[part], sampled.logprobs[part])

    def _extend(
        self, sequence: Sequence, tokens: "array[int]", logprobs: list[Logprobs | None]
    ) -> None:
        """Give a sequence its next tokens, up to its end."""
        choice = sequence.choices[0]
        decoding.extend(sequence, tokens, logprobs)
        self._outbox.output(sequence, choice, sequence.sent)
        if sequence.finish is not None:
            self._placement.stop(sequence)
            sequence.request.end(choice)
            self._end_if_finished(sequence.request)

    def _completed(self, sequence: Sequence, embedding: Floats | None) -> None:
        """End a sequence of which only the prompt was to be computed."""
        sequence.finish = Finish.LENGTH
        for choice in filter(sequence.answers, sequence.choices):
            self._outbox.output(sequence, choice, 0, embedding)
            sequence.request.end(choice)
        self._placement.stop(sequence)
        self._end_if_finished(sequence.request)

    def _candidates(self, beam: Sequence, search: BeamSearch, candidates: Logprobs | None) -> None:
        """Keep a beam's candidates; once all beams have theirs, the search takes a step."""
        beam.candidates = candidates
        request = beam.request
        beams = list(request.sequences.values())
        found = [each.candidates for each in beams if each.candidates is not None]
        if len(found) < len(beams):
            return
        outputs = [each.tokens[len(request.prompt) :] for each in beams]
        going = search.advance(outputs, [each.logprobs for each in beams], found)
        alive = {continuation.beam for continuation in going}
        for number, each in enumerate(beams):
            if number not in alive:
                self._drop(each)
        for forks in decoding.fork_beams(request, beams, going):
            self._placement.share(forks)
        decoding.append_continuations(request, going)
        if not going:
            for choice, rank in request.answers.items():
                if rank < len(search.answers):
                    self._outbox.answer(request, choice, search.answers[rank], beams[0].cached)
                else:  # a grammar allows fewer texts than that
                    self._outbox.no_answer(request, choice, Finish.ABORT)
            self._end_if_finished(request)
