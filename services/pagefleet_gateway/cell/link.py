"""The gateway's side of the talk with the scheduler, without I/O and without a clock.

A gateway holds the hard state: of each open request the prompt, the parameters and every token
received for each choice. Whatever the scheduler forgets can be made again from these. So the rules
are few, and each may be applied any number of times:

- A message of an epoch that was left is void, until the present one falls silent: what came last
  may have been the late word of a scheduler that is dead. A new epoch means that the scheduler
  knows nothing: every open request is submitted again, under the next attempt, with what was
  received.
- A request that the scheduler does not know (`Pulse.unknown`) is submitted again likewise.
- Output at a position below what is here is a repeat: what is known is compared and skipped.
  Output beyond is a gap: it is ignored, and the positions of the next beat make the scheduler send
  what is missing. Logprobs of the prompt follow the same rule; no output is taken before they are
  whole, but the word that the time is over.
- An unequal repeat means that the scheduler follows another stream than the client saw: the request
  is submitted again, and goes on from what the client saw.
- A choice gets no more than `Submit.window` tokens ahead of its client; `Credit` allows more as the
  client takes what came, and is said again with the beats until something follows from it.
- Output of a choice that ended here is answered by another `Abort`, in case the first was lost.
- A gateway that is refused submits nothing, and asks again, until it is welcome.
- A request whose client went to another gateway, and has its stream go on there, is over (`Moved`).
- A request without a length of its own that came before the first worker is submitted again as
  soon as it is known that this one holds less than the model could, though it was refused for that.

Messages and calls go in with the time `now` (seconds of any monotonic clock); what comes out is
`Reaction`: messages to send to the scheduler, and news for the requests' owners.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pagefleet.wire import (
    PROTOCOL,
    Abort,
    Credit,
    Finish,
    FromGateway,
    GatewayBeat,
    GatewayBye,
    GatewayHello,
    Moved,
    OpenRequest,
    Output,
    Outputs,
    PromptOutput,
    Pulse,
    Reason,
    Refused,
    Rejected,
    Submit,
    TenantUse,
    ToGateway,
    Welcome,
    unpack_ints,
)
from pagefleet_gateway.cell.outputs import count as count_of
from pagefleet_gateway.cell.outputs import parted, sliced
from pagefleet_gateway.cell.submission import OpenChoice, OpenSubmission

BEAT_SECONDS = 0.2
"""Between two beats."""

SILENCE_SECONDS = 1.0
"""Without an answer before the scheduler counts as gone, and is greeted again."""

PATIENCE_SECONDS = 30.0
"""That an open request waits for a scheduler; anew after this process was itself stopped."""

RESUBMIT_SECONDS = 0.5
"""After a submission, before which a pulse that does not know of it may be older than it."""

News = Output | PromptOutput | Rejected
"""What the owner of a request gets: tokens and prompt logprobs without repeats or gaps, or the
refusal that ends the request."""


@dataclass(slots=True)
class Reaction:
    """What follows from an event."""

    messages: list[FromGateway] = field(default_factory=list)
    news: list[News] = field(default_factory=list)

    def extend(self, other: "Reaction") -> None:
        """Let `other` follow."""
        self.messages += other.messages
        self.news += other.news


@dataclass(slots=True)
class Counters:
    """What should be rare; exported as metrics."""

    resubmissions: int = 0
    repeats: int = 0
    gaps: int = 0
    conflicts: int = 0
    """Repeats that were not equal."""
    void: int = 0
    """Items of an older epoch or attempt."""


class SchedulerLink:
    """Protocol state of one gateway; see the module's text."""

    def __init__(self, now: float, fingerprint: str = "") -> None:
        self.epoch: int | None = None
        self.pulse: Pulse | None = None
        self.refusal: str | None = None
        """Why the scheduler will not work with this gateway."""
        self.counters = Counters()
        self.longest: int | None = None
        """The longest sequence that some worker holds or, while there is none, held last; None
        before the first."""
        self._open: dict[str, OpenSubmission] = {}
        self._left_epochs: set[int] = set()
        self._heard = self._ticked = self._awake = now
        """When something was last heard, `tick` was called, and this process had been stopped."""
        self._welcomed = False
        self._fingerprint = fingerprint

    def __repr__(self) -> str:
        return f"<SchedulerLink epoch={self.epoch} {len(self._open)} open>"

    def check(self) -> None:
        """Assert the invariants."""
        for request, submission in self._open.items():
            assert submission.submit.request == request
            assert not submission.finished
            assert 1 <= submission.prompt_position <= submission.prompt_end
            assert submission.attempt >= (self.epoch is not None)
        assert self.epoch not in self._left_epochs

    @property
    def open_requests(self) -> int:
        """How many wait for more."""
        return len(self._open)

    def alive(self, now: float) -> bool:
        """Whether the scheduler has answered lately."""
        return self._welcomed and now - self._heard < SILENCE_SECONDS

    # --- from the gateway -----------------------------------------------------------------------

    def submit(self, submit: Submit, now: float, shrinks: bool = False) -> Reaction:
        """Take a request over; its `attempt` and the tokens of its choices are kept here.

        shrinks: its length is not its client's wish, and may be less.
        """
        submission = self._open[submit.request] = OpenSubmission.of(submit, now, shrinks)
        if self.longest is not None:
            submission.shrink(self.longest)
        if self.epoch is None:
            return Reaction()
        return Reaction([submission.handed_over(now)])

    def abort(self, request: str, choices: Iterable[int] | None = None) -> Reaction:
        """End some choices, or the whole request. Ends that are known already change nothing."""
        submission = self._open.get(request)
        if submission is None:
            return Reaction()
        if choices is None:
            del self._open[request]
            return Reaction([Abort(request, submission.attempt)])
        ended = [index for index in choices if not submission.choices[index].finished]
        for index in ended:
            self._end_choice(submission, submission.choices[index])
        return Reaction([Abort(request, submission.attempt, ended)] if ended else [])

    def taken(self, request: str, index: int, count: int) -> Reaction:
        """The client has taken `count` tokens of a choice: so many more may come."""
        submission = self._open.get(request)
        limits = submission.take(index, count) if submission else {}
        return Reaction(
            [Credit(request, submission.attempt, limits)] if submission and limits else []
        )

    def tick(self, now: float, used: Mapping[str, TenantUse] | None = None) -> Reaction:
        """To be called every `BEAT_SECONDS`: greet or beat, and give up what waited too long.

        used: what tenants used at this gateway.
        """
        reaction = Reaction()
        if now - self._ticked >= SILENCE_SECONDS:
            self._awake = now
        self._ticked = now
        if now - self._heard >= SILENCE_SECONDS:
            self._welcomed = False
            self._left_epochs.clear()
        if not self._welcomed:
            reaction.messages.append(GatewayHello(PROTOCOL, self._fingerprint))
            reaction.news += self._give_up(now)
        if self.epoch is not None:
            beat = GatewayBeat(
                [
                    OpenRequest(request, submission.attempt, submission.positions())
                    for request, submission in self._open.items()
                ],
                dict(used or {}),
                self._fingerprint,
            )
            reaction.messages.append(beat)
            for request, submission in self._open.items():
                if limits := submission.unanswered_credits():
                    reaction.messages.append(Credit(request, submission.attempt, limits))
        return reaction

    def leave(self) -> Reaction:
        """Say goodbye."""
        self._open.clear()
        return Reaction([GatewayBye()])

    # --- from the scheduler ---------------------------------------------------------------------

    def handle(self, message: ToGateway, now: float) -> Reaction:
        """Take a message in."""
        if isinstance(message, Refused):
            self.refusal, self.epoch, self._welcomed = message.text, None, False
            return Reaction()
        if isinstance(message, Rejected):
            self._heard = now
            return self._rejected(message)
        if isinstance(message, Moved):
            return self._moved(message)
        if message.epoch in self._left_epochs:
            self.counters.void += 1
            return Reaction()
        self._heard = now
        due = self._learn(message.max_model_len) if isinstance(message, Welcome | Pulse) else []
        if message.epoch != self.epoch:
            self._enter(message.epoch)
            due = list(self._open.values())
        reaction = Reaction([self._hand_over(each, now) for each in due])
        match message:
            case Welcome():
                self._welcomed = True
                self.refusal = None
            case Pulse():
                self.pulse = message
                for request in message.unknown:
                    reaction.extend(self._submit_again(request, now))
            case Outputs():
                for piece in message.prompts:
                    reaction.extend(self._prompt_output(piece, now))
                for item in message.items:
                    reaction.extend(self._output(item, now))
        return reaction

    def _enter(self, epoch: int) -> None:
        if self.epoch is not None:
            self._left_epochs.add(self.epoch)
            self._welcomed = False
        self.epoch = epoch
        self.pulse = None

    def _hand_over(self, submission: OpenSubmission, now: float) -> Submit:
        self.counters.resubmissions += submission.attempt > 0
        return submission.handed_over(now)

    def _submit_again(self, request: str, now: float) -> Reaction:
        submission = self._open.get(request)
        if submission is None or now - submission.submitted < RESUBMIT_SECONDS:
            return Reaction()
        return Reaction([self._hand_over(submission, now)])

    def _learn(self, longest: int) -> list[OpenSubmission]:
        """What becomes shorter when workers hold `longest` tokens: they may be fewer as long as one
        that holds more is being started again, and no stream is to become shorter by that.
        """
        if not longest:
            return []
        known, self.longest = self.longest, longest
        return [] if known else [each for each in self._open.values() if each.shrink(longest)]

    def _rejected(self, message: Rejected) -> Reaction:
        submission = self._open.get(message.request)
        if submission is None or submission.attempt != message.attempt:
            self.counters.void += 1
            return Reaction()
        if message.reason is Reason.TOO_LONG and submission.shrinks and self.longest is None:
            return Reaction()
        del self._open[message.request]
        return Reaction(news=[message])

    def _moved(self, message: Moved) -> Reaction:
        submission = self._open.pop(message.request, None)
        if submission is None:
            self.counters.void += 1
            return Reaction()
        text = "This stream goes on at another connection."
        return Reaction(news=[Rejected(message.request, submission.attempt, Reason.MOVED, text)])

    def _give_up(self, now: float) -> list[News]:
        late = [
            request
            for request, submission in self._open.items()
            if now - max(self._heard, self._awake, submission.opened) >= PATIENCE_SECONDS
        ]
        text = "No scheduler answers. Try again later."
        return [
            Rejected(request, self._open.pop(request).attempt, Reason.NO_WORKER, text)
            for request in late
        ]

    def _current(self, item: Output | PromptOutput) -> OpenSubmission | None:
        submission = self._open.get(item.request)
        if submission is not None and submission.attempt == item.attempt:
            return submission
        self.counters.void += 1
        return None

    def _prompt_output(self, piece: PromptOutput, now: float) -> Reaction:
        submission = self._current(piece)
        if submission is None:
            return Reaction()
        known = submission.prompt_position - piece.position
        if known < 0:
            self.counters.gaps += 1
            return Reaction()
        count = count_of(piece.logprobs)
        if known >= count:
            self.counters.repeats += 1
            return Reaction()
        submission.prompt_position = min(piece.position + count, submission.prompt_end)
        rest = sliced(piece.logprobs, known, submission.prompt_end - piece.position)
        fresh = PromptOutput(piece.request, piece.attempt, piece.position + known, rest)
        return Reaction(news=[fresh])

    def _output(self, item: Output, now: float) -> Reaction:
        submission = self._current(item)
        if submission is None:
            return Reaction([] if item.request in self._open else [_stray(item)])
        choice = submission.choices.get(item.choice)
        if choice is None or choice.finished:
            return Reaction([] if item.finish else [_stray(item)])
        known = len(choice.tokens) - item.position
        too_late = item.finish is Finish.TIMEOUT
        if submission.prompt_position < submission.prompt_end and not too_late:
            self.counters.gaps += 1
            return self._submit_again(item.request, now)
        if known < 0:
            self.counters.gaps += 1
            return Reaction()
        tokens = unpack_ints(item.tokens)
        if known and tokens[:known] != choice.tokens[item.position : item.position + len(tokens)]:
            self.counters.conflicts += 1
            return Reaction([self._hand_over(submission, now)])
        if known > len(tokens) or (known == len(tokens) and item.finish is None):
            self.counters.repeats += 1
            return Reaction()
        if known:
            self.counters.repeats += 1
            tokens, item = tokens[known:], parted(item, known)[1]
        choice.tokens.extend(tokens)
        choice.numerics = item.numerics
        if item.finish is not None:
            self._end_choice(submission, choice)
        return Reaction(news=[item])

    def _end_choice(self, submission: OpenSubmission, choice: OpenChoice) -> None:
        choice.finished = True
        if submission.finished:
            del self._open[submission.submit.request]


def _stray(item: Output) -> Abort:
    return Abort(item.request, item.attempt, [item.choice])
