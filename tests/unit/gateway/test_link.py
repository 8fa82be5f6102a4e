"""The link to the scheduler as a state machine, against a scripted scheduler and a random one."""

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    Abort,
    ChoiceState,
    Credit,
    Finish,
    GatewayBeat,
    GatewayBye,
    GatewayHello,
    Logprobs,
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
    Welcome,
    pack_floats,
    pack_ints,
    unpack_floats,
    unpack_ints,
)
from pagefleet_gateway.cell.link import (
    BEAT_SECONDS,
    PATIENCE_SECONDS,
    RESUBMIT_SECONDS,
    SILENCE_SECONDS,
    News,
    SchedulerLink,
)

PARAMS = SamplingParams(max_tokens=8, seed=1)


def submit(request: str = "r", choices: int = 1, params: SamplingParams = PARAMS) -> Submit:
    return Submit(
        request, 0, pack_ints([5, 6, 7, 8]), params, [ChoiceState(i) for i in range(choices)]
    )


def output(
    position: int, *tokens: int, finish: Finish | None = None, attempt: int = 1, choice: int = 0
) -> Output:
    return Output("r", attempt, choice, position, pack_ints(tokens), finish=finish)


def pulse(epoch: int = 7, *unknown: str, longest: int = 4096) -> Pulse:
    return Pulse(epoch, 1, 0, 0, longest, list(unknown), False)


def welcomed() -> SchedulerLink:
    link = SchedulerLink(0.0)
    assert link.tick(0.0).messages == [GatewayHello(PROTOCOL)]
    link.handle(Welcome(7, PROTOCOL), 0.1)
    return link


def running(**options: int) -> SchedulerLink:
    link = welcomed()
    link.submit(submit(**options), 0.2)  # type: ignore[arg-type]
    return link


def test_a_request_waits_for_the_welcome() -> None:
    link = SchedulerLink(0.0)
    assert link.submit(submit(), 0.0).messages == []
    (sent,) = link.handle(Welcome(7, PROTOCOL), 2.0).messages
    assert isinstance(sent, Submit)
    assert (sent.attempt, sent.age) == (1, 2.0)


def test_what_takes_what_fits_is_shortened_when_the_first_worker_is_known() -> None:
    link = welcomed()
    link.submit(submit("asked"), 0.2)
    link.submit(submit("fits"), 0.2, shrinks=True)
    assert link.handle(pulse(longest=0), 0.3).messages == []
    (again,) = link.handle(pulse(longest=9), 0.4).messages
    assert isinstance(again, Submit)
    assert (again.request, again.attempt, again.params.max_tokens) == ("fits", 2, 5)
    assert link.handle(pulse(longest=6), 0.5).messages == [], "it may have begun"
    (late,) = link.submit(submit("late"), 0.8, shrinks=True).messages
    assert isinstance(late, Submit)
    assert (late.attempt, late.params.max_tokens) == (1, 2)
    link.check()


def test_what_takes_what_fits_is_handed_over_once_if_that_is_known_with_the_welcome() -> None:
    link = SchedulerLink(0.0)
    link.submit(submit("fits"), 0.0, shrinks=True)
    (sent,) = link.handle(Welcome(7, PROTOCOL, 9), 0.1).messages
    assert isinstance(sent, Submit)
    assert (sent.attempt, sent.params.max_tokens) == (1, 5)


def test_what_takes_what_fits_is_not_too_long_before_it_is_known_what_fits() -> None:
    """A worker has joined, and the pulse that says so is still on its way."""
    link = welcomed()
    link.submit(submit("asked"), 0.2)
    link.submit(submit("fits"), 0.2, shrinks=True)
    refusals = {name: Rejected(name, 1, Reason.TOO_LONG, "") for name in ("asked", "fits")}
    assert link.handle(refusals["asked"], 0.3).news == [refusals["asked"]]
    assert link.handle(refusals["fits"], 0.3).news == []
    (again,) = link.handle(pulse(7, "fits", longest=9), 0.4).messages
    assert isinstance(again, Submit)
    assert (again.attempt, again.params.max_tokens) == (2, 5)
    last = Rejected("fits", 2, Reason.TOO_LONG, "")
    assert link.handle(last, 0.5).news == [last]


def test_tokens_arrive_once() -> None:
    link = running()
    assert link.handle(Outputs(7, [output(0, 1, 2)]), 1).news == [output(0, 1, 2)]
    assert link.handle(Outputs(7, [output(0, 1, 2)]), 1).news == []
    assert link.handle(Outputs(7, [output(1, 2, 3)]), 1).news == [output(2, 3)]
    assert link.handle(Outputs(7, [output(9, 4)]), 1).news == []
    assert link.tick(1).messages == [GatewayBeat([OpenRequest("r", 1, {0: 3})])]
    end = output(3, 9, finish=Finish.STOP)
    assert link.handle(Outputs(7, [end]), 1).news == [end]
    assert link.tick(1).messages == [GatewayBeat([])]
    assert (link.counters.repeats, link.counters.gaps) == (2, 1)


def test_logprobs_are_cut_with_their_tokens() -> None:
    link = running()
    logprobs = Logprobs(
        pack_floats([-1, -2, -3]), pack_ints([1, 10, 2, 20, 3, 30]), pack_floats([0] * 6)
    )
    link.handle(Outputs(7, [output(0, 1)]), 1)
    whole = Output("r", 1, 0, 0, pack_ints([1, 2, 3]), logprobs)
    (news,) = link.handle(Outputs(7, [whole]), 1).news
    assert isinstance(news, Output)
    assert news.logprobs is not None
    assert unpack_floats(news.logprobs.chosen).tolist() == [-2, -3]
    assert unpack_ints(news.logprobs.top_ids).tolist() == [2, 20, 3, 30]


def test_a_new_scheduler_is_told_in_which_class_the_latest_tokens_were_computed() -> None:
    link = running()
    for position, numerics in enumerate([5, 6]):
        item = Output("r", 1, 0, position, pack_ints([1]), numerics=numerics)
        link.handle(Outputs(7, [item]), 1)
    repeat = Output("r", 1, 0, 0, pack_ints([1]), numerics=5)
    link.handle(Outputs(7, [repeat]), 1)
    (again,) = link.handle(pulse(8), 2).messages
    assert isinstance(again, Submit)
    assert again.choices == [ChoiceState(0, pack_ints([1, 1]), numerics=6)]


def test_a_finish_without_tokens_counts_at_the_end_only() -> None:
    link = running()
    link.handle(Outputs(7, [output(0, 1, 2)]), 1)
    assert link.handle(Outputs(7, [output(1, finish=Finish.LENGTH)]), 1).news == []
    assert len(link.handle(Outputs(7, [output(2, finish=Finish.LENGTH)]), 1).news) == 1


def test_a_new_epoch_gets_everything_that_was_received() -> None:
    link = running(choices=2)
    link.handle(Outputs(7, [output(0, 1, 2), output(0, 3, choice=1, finish=Finish.STOP)]), 1)
    (again,) = link.handle(pulse(8), 2).messages
    assert isinstance(again, Submit)
    assert again.attempt == 2
    assert again.choices == [
        ChoiceState(0, pack_ints([1, 2])),
        ChoiceState(1, pack_ints([3]), finished=True),
    ]
    assert link.handle(Outputs(8, [output(2, 4, attempt=1)]), 2).news == []
    assert link.handle(Outputs(7, [output(2, 4, attempt=2)]), 2).news == []
    assert len(link.handle(Outputs(8, [output(2, 4, attempt=2)]), 2).news) == 1
    assert link.handle(pulse(7), 2).messages == []


def test_the_late_word_of_a_dead_scheduler_does_not_shut_the_living_one_out() -> None:
    link = running()
    assert isinstance(link.handle(pulse(6), 0.3).messages[0], Submit)
    assert link.handle(pulse(7), 0.4).messages == []
    link.tick(1.4)
    (again,) = link.handle(Welcome(7, PROTOCOL), 1.5).messages
    assert isinstance(again, Submit)
    assert link.epoch == 7


def test_what_is_left_until_the_deadline_shrinks_with_the_attempts() -> None:
    link = welcomed()
    link.submit(replace(submit(), left=2.0), 0.5)
    for now, left in ((1.5, 1.0), (9.0, 0.0)):
        (again,) = link.handle(Welcome(int(now), PROTOCOL), now).messages
        assert isinstance(again, Submit)
        assert again.left == left


def test_an_unknown_request_is_submitted_again_but_not_at_once() -> None:
    link = running()
    assert link.handle(pulse(7, "r", "other"), 0.3).messages == []
    (again,) = link.handle(pulse(7, "r", "other"), 0.3 + RESUBMIT_SECONDS).messages
    assert isinstance(again, Submit)
    assert again.attempt == 2


def test_an_unequal_repeat_makes_the_scheduler_follow_the_client() -> None:
    link = running()
    link.handle(Outputs(7, [output(0, 1, 2)]), 1)
    reaction = link.handle(Outputs(7, [output(1, 9, 9)]), 1)
    assert reaction.news == []
    (again,) = reaction.messages
    assert isinstance(again, Submit)
    assert again.choices == [ChoiceState(0, pack_ints([1, 2]))]


def test_output_waits_for_the_logprobs_of_the_prompt() -> None:
    link = welcomed()
    link.submit(submit(params=SamplingParams(max_tokens=8, seed=1, prompt_logprobs=0)), 0.2)

    def piece(position: int, *logprobs: float, attempt: int = 1) -> PromptOutput:
        return PromptOutput("r", attempt, position, Logprobs(pack_floats(logprobs), b"", b""))

    assert link.handle(Outputs(7, [], [piece(1, -1)]), 0.3).news == [piece(1, -1)]
    assert link.handle(Outputs(7, [], [piece(3, -3)]), 0.3).news == []
    assert link.handle(Outputs(7, [output(0, 1)]), 0.3).news == []
    (again,) = link.handle(Outputs(7, [output(0, 1)]), 1.0).messages
    assert isinstance(again, Submit)
    whole = Outputs(7, [output(0, 1, attempt=2)], [piece(1, -1, -2, -3, attempt=2)])
    assert link.handle(whole, 1.1).news == [
        piece(2, -2, -3, attempt=2),
        output(0, 1, attempt=2),
    ]


def test_the_time_may_be_over_before_the_prompt_is_whole() -> None:
    link = running(params=replace(PARAMS, prompt_logprobs=1))
    end = output(0, finish=Finish.TIMEOUT)
    assert link.handle(Outputs(7, [end]), 1).news == [end]
    assert link.open_requests == 0


def test_aborts_are_repeated_for_whoever_goes_on() -> None:
    link = running(choices=2)
    assert link.abort("r", [1]).messages == [Abort("r", 1, [1])]
    assert link.abort("r", [1]).messages == []
    assert link.handle(Outputs(7, [output(0, 5, choice=1)]), 1).messages == [Abort("r", 1, [1])]
    assert link.abort("r").messages == [Abort("r", 1)]
    assert link.handle(Outputs(7, [output(0, 5)]), 1).messages == [Abort("r", 1, [0])]
    end = output(0, 5, finish=Finish.LENGTH, choice=1)
    assert link.handle(Outputs(7, [end]), 1).news == []
    assert link.abort("r").messages == []


def test_a_rejection_ends_the_attempt_it_speaks_of() -> None:
    link = running()
    link.handle(pulse(8), 1)
    assert link.handle(Rejected("r", 1, Reason.OVERLOADED, "full"), 1).news == []
    rejection = Rejected("r", 2, Reason.OVERLOADED, "full")
    assert link.handle(rejection, 1).news == [rejection]
    assert link.handle(rejection, 1).news == []


def test_a_request_that_moved_is_over_whatever_its_attempt() -> None:
    link = running()
    link.handle(pulse(8), 1)
    (news,) = link.handle(Moved("r"), 1).news
    assert isinstance(news, Rejected)
    assert (news.request, news.attempt, news.reason) == ("r", 2, Reason.MOVED)
    assert link.handle(Moved("r"), 1).news == []
    assert link.open_requests == 0


def test_patience_without_a_scheduler_ends() -> None:
    link = running()
    assert link.alive(0.2)
    assert not link.alive(0.2 + SILENCE_SECONDS)
    assert pass_time(link, 0.2, 2.0) == []
    assert GatewayHello(PROTOCOL) in link.tick(2.0).messages
    assert pass_time(link, 2.0, 20.0) == []
    link.submit(submit("late"), 20.0)
    (news,) = pass_time(link, 20.0, 1.0 + PATIENCE_SECONDS)
    assert isinstance(news, Rejected)
    assert (news.request, news.reason) == ("r", Reason.NO_WORKER)
    (news,) = pass_time(link, 1.0 + PATIENCE_SECONDS, 20.6 + PATIENCE_SECONDS)
    assert news.request == "late"


def test_who_was_stopped_has_not_waited() -> None:
    """All of a machine may have been, so that a scheduler answers as soon as it is asked."""
    link = running()
    end = 0.2 + 2 * PATIENCE_SECONDS
    assert link.tick(end).news == []
    assert GatewayHello(PROTOCOL) in link.tick(end + BEAT_SECONDS).messages
    assert pass_time(link, end, end + PATIENCE_SECONDS - 0.4) == []
    (news,) = pass_time(link, end + PATIENCE_SECONDS - 0.4, end + PATIENCE_SECONDS + 0.6)
    assert news.request == "r"


def pass_time(link: SchedulerLink, now: float, end: float) -> list[News]:
    """What the owners of requests hear while nobody answers."""
    news: list[News] = []
    while now < end:
        news += link.tick(now).news
        now += BEAT_SECONDS
    return news


def test_a_refused_handshake_is_told_and_leaving_too() -> None:
    link = SchedulerLink(0.0)
    link.handle(Refused("other protocol"), 0.1)
    assert link.refusal == "other protocol"
    assert not link.alive(0.1)
    assert link.leave().messages == [GatewayBye()]


def test_one_that_is_refused_submits_nothing_until_it_is_welcome() -> None:
    link = SchedulerLink(0.0, "model")
    assert link.tick(0.0).messages == [GatewayHello(PROTOCOL, "model")]
    link.handle(Welcome(7, PROTOCOL), 0.1)
    link.submit(submit(), 0.1)
    _, beat = (*link.tick(0.2).messages, *link.tick(0.4).messages)
    assert isinstance(beat, GatewayBeat)
    assert beat.fingerprint == "model"
    link.handle(Refused("other model"), 0.5)
    assert link.submit(replace(submit(), request="s"), 0.5).messages == []
    assert link.tick(0.6).messages == [GatewayHello(PROTOCOL, "model")]
    assert (link.refusal, link.alive(0.6)) == ("other model", False)
    again = link.handle(Welcome(7, PROTOCOL), 0.7).messages
    assert [(sent.request, sent.attempt) for sent in again] == [("r", 2), ("s", 1)]
    assert link.refusal is None


class FaultyScheduler(RuleBasedStateMachine):
    """A scheduler that loses, repeats and forgets; the owner of each request sees every token once.

    The right stream is a function of (request, choice, position), as it is of prompt and seed.
    """

    LENGTH = 6

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.link = SchedulerLink(0.0)
        self.epoch = 1
        self.known: dict[str, Submit] = {}
        self.sent: dict[tuple[str, int], int] = {}
        self.seen: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.opened = 0
        self.take(self.link.handle(Welcome(1, PROTOCOL), 0.0))

    def token(self, request: str, choice: int, position: int) -> int:
        return (int(request) * 31 + choice * 7 + position * position) % 1000

    def take(self, reaction: object) -> None:
        for message in reaction.messages:  # type: ignore[attr-defined]
            self.receive(message)
        for news in reaction.news:  # type: ignore[attr-defined]
            key = (news.request, news.choice)
            assert news.position == len(self.seen[key])
            assert key not in self.ended
            self.seen[key] += unpack_ints(news.tokens).tolist()
            if news.finish:
                self.ended.add(key)

    def receive(self, message: object) -> None:
        if self.random.random() < 0.2:
            return
        match message:
            case Submit(request=request):
                self.known[request] = message
                for state in message.choices:
                    received = unpack_ints(state.tokens)
                    assert received == array("i", self.seen[request, state.index])
                    assert state.finished == ((request, state.index) in self.ended)
                    self.sent[request, state.index] = len(received)
            case GatewayBeat(open=open):
                unknown = []
                for line in open:
                    if line.attempt != self.attempt(line.request):
                        unknown.append(line.request)
                        continue
                    for choice, position in line.positions.items():
                        self.sent[line.request, choice] = position
                self.answer(pulse(self.epoch, *unknown))

    def attempt(self, request: str) -> int | None:
        return self.known[request].attempt if request in self.known else None

    def answer(self, message: Pulse | Outputs) -> None:
        for _ in range(self.random.choice([0, 1, 1, 1, 2])):
            self.take(self.link.handle(message, self.now))

    @rule(choices=st.integers(1, 3))
    def open(self, choices: int) -> None:
        request = str(self.opened)
        self.opened += 1
        self.seen.update({(request, choice): [] for choice in range(choices)})
        self.take(self.link.submit(submit(request, choices), self.now))

    @precondition(lambda self: self.sent)
    @rule(count=st.integers(0, 3))
    def generate(self, count: int) -> None:
        self.go_on(*self.random.choice(sorted(self.sent)), count)

    def go_on(self, request: str, choice: int, count: int) -> None:
        if request not in self.known:
            return
        start = self.sent[request, choice]
        end = min(start + count, self.LENGTH)
        tokens = [self.token(request, choice, position) for position in range(start, end)]
        finish = Finish.LENGTH if end == self.LENGTH else None
        attempt = self.known[request].attempt
        self.sent[request, choice] = end
        item = Output(request, attempt, choice, start, pack_ints(tokens), finish=finish)
        self.answer(Outputs(self.epoch, [item]))

    @rule()
    def forget(self) -> None:
        self.epoch += 1
        self.known.clear()

    @rule(seconds=st.sampled_from([0.2, 0.2, 0.7]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.link.tick(self.now))

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.link.check()
        for (request, choice), tokens in self.seen.items():
            assert tokens == [self.token(request, choice, p) for p in range(len(tokens))]

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        for _ in range(400):
            if self.ended == self.seen.keys():
                return
            self.wait(0.3)
            for request, choice in sorted(self.sent.keys() - self.ended):
                self.sent[request, choice] = len(self.seen[request, choice])
                self.go_on(request, choice, 3)
        pytest.fail(f"unfinished: {self.seen.keys() - self.ended}")


TestFaultyScheduler = FaultyScheduler.TestCase
TestFaultyScheduler.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_credit_follows_the_client_and_is_said_until_it_is_heard() -> None:
    link = welcomed()
    (first,) = link.submit(replace(submit(), window=4), 0.2).messages
    assert isinstance(first, Submit)
    assert first.window == 4
    link.handle(Outputs(7, [output(0, 1)]), 0.3)
    assert link.taken("r", 0, 1).messages == []
    link.handle(Outputs(7, [output(1, 2, 3, 4)]), 0.4)
    assert link.taken("r", 0, 2).messages == [Credit("r", 1, {0: 6})]
    assert link.taken("r", 0, 3).messages == []
    assert link.taken("r", 0, 4).messages == [Credit("r", 1, {0: 8})]
    assert len(link.tick(0.6).messages) == 1
    assert link.tick(0.8).messages[1:] == [Credit("r", 1, {0: 8})]
    link.handle(Outputs(7, [output(4, 5)]), 0.9)
    assert len(link.tick(1.0).messages) == 1
    (again,) = link.handle(Pulse(7, 1, 0, 0, 4096, ["r"], False), 1.1).messages
    assert isinstance(again, Submit)
    assert len(link.tick(1.4).messages) == 1


def test_without_a_window_there_is_no_credit() -> None:
    link = running()
    link.handle(Outputs(7, [output(0, *range(7))]), 0.3)
    assert link.taken("r", 0, 7).messages == []
