"""SIGHUP replaces every process of `pagefleet serve` under load, and no client sees it."""

import asyncio
import os
import random
import signal
from dataclasses import replace

import httpx
import pytest

from benchmarks.drill.processes import children, is_alive
from benchmarks.drill.questions import Questioner
from benchmarks.drill.streams import EXACT, ask
from benchmarks.loadgen.recording import Server
from pagefleet_worker.prepare import prepare
from tests.streams import read
from tests.system.serving import pagefleet_serve
from tests.unit.launcher.conftest import wait_until

CLIENTS = 12
REPLACED = "serve | all processes are replaced"


@pytest.fixture
def questions(tmp_path):
    seed = random.randrange(2**32)
    print("questions of seed", seed)
    return Questioner(prepare("echo", tmp_path / "cache"), seed)


def serving(folder, *options):
    echo = ["--model=echo", "--engine=echo", "--step-seconds=0.01", "--check"]
    return pagefleet_serve(folder, *echo, *options, XDG_CACHE_HOME=str(folder / "cache"))


async def new_connections(server, questions, done, answers):
    """A client that asks again and again, over a new connection each time."""
    while not done.is_set():
        answers.append(await ask(server, questions.any(100, 100)))


async def kept_connection(url, questions, done, answers):
    """A client that asks again and again over a connection that it keeps while it may."""
    async with httpx.AsyncClient(timeout=60) as client:
        while not done.is_set():
            question = questions.ask("greedy", 20, 10, stream=False)
            response = await client.post(f"{url}/v1/completions", content=question.body)
            tokens = response.json()["choices"][0]["token_ids"]
            answers.append((response.status_code, tokens == question.expected[0]))


async def load_while_replaced(serving, questions, restarts):
    """The answers of all clients while all processes are replaced so often."""
    done, answers, kept = asyncio.Event(), [], []
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            server = Server.at(serving.url)
            group.create_task(new_connections(server, questions, done, answers))
            group.create_task(kept_connection(serving.url, questions, done, kept))
        for count in range(1, restarts + 1):
            serving.process.send_signal(signal.SIGHUP)
            await asyncio.to_thread(
                wait_until, lambda n=count: serving.log.read_text().count(REPLACED) == n, 120
            )
        done.set()
    return answers, kept


@pytest.mark.parametrize(
    ("workers", "gateways"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)]
)
def test_no_client_notices(tmp_path, questions, workers, gateways):
    with serving(tmp_path, f"--workers={workers}", f"--gateways={gateways}") as cell:
        before = children(cell.process.pid)
        answers, kept = asyncio.run(load_while_replaced(cell, questions, restarts=1))
        after = children(cell.process.pid)
        assert len(before) == len(after) == 1 + workers + gateways
        assert not before.keys() & after.keys()
    gaps = sorted(answer.longest_gap for answer in answers)
    print(f"{len(answers)} + {len(kept)} answers, the longest gap {gaps[-1]:.2f} s")
    assert len(answers) > CLIENTS
    assert len(kept) > CLIENTS
    assert [(a.question.form, a.verdict, a.error) for a in answers if a.verdict != EXACT] == []
    assert [each for each in kept if each != (200, True)] == []


def test_a_gateway_that_hands_over_answers_who_is_there_and_tells_them(tmp_path, questions):
    """The last answer over a connection says that it is the last, and then the gateway ends."""
    question = questions.ask("greedy", 20, 5, stream=False)
    with serving(tmp_path) as cell, httpx.Client(timeout=60) as client:
        services = children(cell.process.pid)
        gateway = next(pid for pid, name in services.items() if name == "gateway")

        def is_last():
            answer = client.post(f"{cell.url}/v1/completions", content=question.body)
            assert answer.json()["choices"][0]["token_ids"] == question.expected[0]
            return answer.headers.get("connection") == "close"

        assert not is_last()
        os.kill(gateway, signal.SIGHUP)
        wait_until(is_last)
        wait_until(lambda: "gateway-0 exited with status 0" in cell.log.read_text())
        assert not is_alive(gateway)


def test_a_stream_that_takes_too_long_goes_on_at_the_successor(tmp_path, questions):
    """The old gateway waits for `--shutdown-timeout`, then ends it with an error of its own.

    It would take half a minute, ten times what the successors of all services need to be ready.
    """
    question = questions.ask("seeded", 20, 3000)
    with serving(tmp_path, "--shutdown-timeout=1") as cell:
        server = Server.at(cell.url)

        def restart(count, _):
            if count == 20:
                cell.process.send_signal(signal.SIGHUP)

        first, last_id, ended = read(server, question, watch=restart)
        assert ended == "overloaded"
        assert 20 < len(first[0]) < question.max_tokens
        rest, _, ended = read(server, question, last_id, lambda count, _: count == 200)
        assert ended is None
        assert len(rest[0]) == 200
    so_far = replace(question, max_tokens=len(first[0]) + len(rest[0]))
    assert [first[0] + rest[0]] == so_far.expected
