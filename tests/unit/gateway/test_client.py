"""The running link: a real socket, a real clock, and a scheduler that comes and goes."""

import asyncio
import time
from pathlib import Path

import pytest

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    Abort,
    ChoiceState,
    Output,
    Reason,
    Rejected,
    Submit,
    pack_ints,
    unpack_ints,
)
from pagefleet_gateway.cell.client import (
    TURN_BYTES,
    TURN_SUBMITS,
    ClientGone,
    Mailbox,
    SchedulerClient,
)
from pagefleet_gateway.cell.outputs import size
from tests.unit.gateway.fake_scheduler import FakeScheduler, expected_token, logprobs_of

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def scheduler(tmp_path: Path) -> FakeScheduler:
    return FakeScheduler(f"ipc://{tmp_path}/gateways.sock", step_seconds=0.002)


def request(name: str = "r", choices: int = 1, max_tokens: int = 40) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    states = [ChoiceState(i) for i in range(choices)]
    return Submit(name, 0, pack_ints(PROMPT), params, states)


async def collect(mailbox: Mailbox, tokens: dict[int, list[int]]) -> None:
    """Add all tokens of these choices; checks that nothing is missing or repeated."""
    open_choices = set(tokens)
    while open_choices:
        for item in await mailbox.take(5.0):
            assert isinstance(item, Output)
            assert item.position == len(tokens[item.choice])
            tokens[item.choice] += unpack_ints(item.tokens).tolist()
            if item.finish:
                open_choices.remove(item.choice)


def expected(choices: int, count: int) -> dict[int, list[int]]:
    return {c: [expected_token(PROMPT, c, p) for p in range(count)] for c in range(choices)}


async def eventually(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_tokens_come_in(scheduler: FakeScheduler) -> None:
    async def talk() -> None:
        client = SchedulerClient(scheduler.endpoint)
        async with client.running(), client.open([request(choices=2)]) as mailbox:
            tokens: dict[int, list[int]] = {0: [], 1: []}
            await collect(mailbox, tokens)
            assert tokens == expected(2, 40)
            await eventually(lambda: client.health.workers > 0)
            assert client.link.longest == 4096

    with scheduler.started():
        asyncio.run(talk())


def test_a_body_of_many_prompts_is_handed_over_in_turns(scheduler: FakeScheduler) -> None:
    requests = [request(f"r{number}", max_tokens=1) for number in range(5 * TURN_SUBMITS)]
    turns = []

    async def look(client: SchedulerClient) -> None:
        while len(turns) < 10:
            turns.append(client.link.open_requests)
            await asyncio.sleep(0)

    async def talk() -> None:
        client = SchedulerClient(scheduler.endpoint)
        async with client.running():
            looking = asyncio.create_task(look(client))
            async with client.open(requests):
                await looking
                assert {1, 2, 3, 4} <= {opened // TURN_SUBMITS for opened in turns}
            assert client.link.open_requests == 0

    asyncio.run(talk())


def test_a_scheduler_that_comes_late_or_again_is_not_noticed(scheduler: FakeScheduler) -> None:
    scheduler.step_seconds = 0.01

    async def talk() -> None:
        client = SchedulerClient(scheduler.endpoint)
        async with client.running(), client.open([request()]) as mailbox:
            tokens: dict[int, list[int]] = {0: []}
            answer = asyncio.create_task(collect(mailbox, tokens))
            await asyncio.sleep(0.05)
            assert not client.health.scheduler
            with scheduler.started():
                await eventually(lambda: len(tokens[0]) > 5)
            scheduler.epoch += 1
            scheduler.running.clear()
            with scheduler.started():
                await answer
            assert tokens == expected(1, 40)
            assert client.link.counters.resubmissions == 1

    asyncio.run(talk())
    first, second = scheduler.submits
    assert (first.attempt, second.attempt) == (1, 2)
    assert len(second.choices[0].tokens) > 5 * 4


def test_the_length_that_workers_hold_outlives_them_and_their_scheduler(
    scheduler: FakeScheduler,
) -> None:
    async def talk() -> None:
        client = SchedulerClient(scheduler.endpoint)
        async with client.running():
            assert client.link.longest is None
            with scheduler.started():
                await eventually(lambda: client.health.workers == 1)
                assert client.link.longest == 4096
                scheduler.workers = 0
                await eventually(lambda: client.health.workers == 0)
                assert client.link.longest == 4096
            scheduler.epoch += 1
            with scheduler.started():
                await eventually(lambda: client.link.epoch == scheduler.epoch)
                await eventually(lambda: client.link.pulse is not None)
                assert client.link.longest == 4096

    asyncio.run(talk())


def test_it_says_once_that_nobody_answers(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagefleet_gateway.cell.client.ALONE_SECONDS", 0.1)

    async def talk() -> None:
        client = SchedulerClient(scheduler.endpoint)
        async with client.running():
            await eventually(lambda: "Requests wait: no scheduler answers at" in caplog.text)
            with scheduler.started():
                await eventually(lambda: client.health.scheduler)
            await eventually(lambda: caplog.text.count("Requests wait") == 2)
        assert "--gateway-endpoint" in caplog.text

    asyncio.run(talk())


def test_it_says_once_why_it_is_refused(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagefleet_gateway.cell.client.ALONE_SECONDS", 600.0)
    scheduler.refusal = "Another model is served here."

    async def talk() -> None:
        client = SchedulerClient(scheduler.endpoint)
        with scheduler.started():
            async with client.running():
                await eventually(lambda: client.health.refusal is not None)
                monkeypatch.setattr("pagefleet_gateway.cell.client.ALONE_SECONDS", 0.1)
                await eventually(lambda: "Requests wait" in caplog.text)
                scheduler.refusal = None
                await eventually(lambda: client.health.scheduler)
        (told,) = [line for line in caplog.messages if "Requests wait" in line]
        assert told == (
            "Requests wait: the scheduler refuses this gateway: Another model is served here."
        )

    asyncio.run(talk())


@pytest.mark.parametrize("alternatives", [None, 0, 20])
def test_a_request_takes_some_news_at_a_time(alternatives: int | None) -> None:
    """2,048 streams of logprobs in one request kept all others waiting for 1.6 s."""
    logprobs = None if alternatives is None else logprobs_of([7] * 8, alternatives)
    item = Output("r", 1, 0, 0, pack_ints([7] * 8), logprobs)

    async def taken() -> tuple[int, list[int]]:
        mailbox, turns, others = Mailbox(), [], 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(3000):
            mailbox.put(item)
        while sum(turns) < 3000:
            turns.append(len(await mailbox.take(5.0)))
        task.cancel()
        return others, turns

    others, turns = asyncio.run(taken())
    assert sum(turns) == 3000
    assert others >= len(turns) > 5
    assert max(turns) <= 1 + TURN_BYTES // size(item)


def test_leaving_the_context_aborts(scheduler: FakeScheduler) -> None:
    async def talk() -> None:
        client = SchedulerClient(scheduler.endpoint)
        async with client.running():
            async with client.open([request("a", max_tokens=10**6), request("b")]) as mailbox:
                await mailbox.take(5.0)
                client.end_choices("b", [0])
            # What is on its way meanwhile is answered by another abort.
            await eventually(lambda: len({abort.request for abort in scheduler.aborts}) == 2)
            await eventually(lambda: not scheduler.running)

    with scheduler.started():
        asyncio.run(talk())
    assert next(abort for abort in scheduler.aborts if abort.request == "b") == Abort("b", 1, [0])
    assert next(abort for abort in scheduler.aborts if abort.request == "a") == Abort("a", 1)


def test_everything_open_can_be_refused(scheduler: FakeScheduler) -> None:
    async def talk() -> None:
        client = SchedulerClient(scheduler.endpoint)
        async with client.running(), client.open([request(max_tokens=10**6)]) as mailbox:
            await mailbox.take(5.0)
            client.refuse_all("closing")
            news = await mailbox.take(5.0)
            assert news[-1] == Rejected("r", 0, Reason.OVERLOADED, "closing")

    with scheduler.started():
        asyncio.run(talk())


def test_a_mailbox_gives_all_at_once_or_nothing_in_time() -> None:
    first, second = (Rejected(name, 1, Reason.FAILED, "") for name in "ab")

    async def use() -> None:
        mailbox = Mailbox()
        assert await mailbox.take(0.01) == []
        asyncio.get_running_loop().call_soon(mailbox.put, first)
        assert await mailbox.take(5.0) == [first]
        mailbox.put(first)
        mailbox.put(second)
        assert await mailbox.take(5.0) == [first, second]
        asyncio.get_running_loop().call_soon(mailbox.hang_up)
        with pytest.raises(ClientGone):
            await mailbox.take(5.0)
        with pytest.raises(ClientGone):
            await mailbox.take(5.0)

    asyncio.run(use())
