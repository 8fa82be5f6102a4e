"""Too much for the pool, and too much for the cell: preemption and refusals, and still exact."""

import asyncio
import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.drill.streams import EXACT, REFUSED, ask
from tests.faults.cell import PATIENCE, make_cell, wait_until
from tests.faults.conftest import Load, assert_exact, once


@pytest.fixture
def small_pool(tmp_path, echo_folder):
    """One worker with 32 blocks of 16 tokens, which two or three sequences fill."""
    arguments = ["--num-blocks=32", "--max-num-seqs=16", "--step-seconds=0.002"]
    with make_cell(tmp_path, echo_folder, workers=1, worker=arguments).running() as cell:
        yield cell
        cell.settle()


def test_sequences_take_each_others_blocks(small_pool, questions):
    load = Load(questions, prompt=100, tokens=90)
    assert_exact(load.run(small_pool))
    assert small_pool.total("num_preemptions") > 0


@pytest.mark.slow
def test_sequences_take_each_others_blocks_under_faults(small_pool, questions):
    """For a minute's worth of sequences, while the worker dies again and again."""
    deaths = itertools.count(1)
    for _ in range(6):
        load = Load(questions, prompt=100, tokens=90)
        watch = once(
            lambda answer: answer.tokens >= 20,
            lambda: (next(deaths), small_pool.workers[0].restart()),
        )
        assert_exact(load.run(small_pool, watch))
    assert next(deaths) == 7


def test_an_answer_is_as_long_as_the_first_worker_can_hold(small_pool):
    """Though its request came before anybody knew how much that is."""
    (worker,), (gateway,) = small_pool.workers, small_pool.gateways
    worker.kill()
    small_pool.scheduler.restart()
    gateway.restart()
    chat = f"http://{small_pool.server.host}:{small_pool.server.port}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(httpx.post, chat, json=body | fields, timeout=PATIENCE)
                 for fields in ({}, streamed, {"min_tokens": 100, "n": 2})]  # fmt: skip
        wait_until(lambda: json.loads(small_pool.get("/status")[1])["open"] == len(asked))
        worker.start()
        whole, stream, two = (each.result() for each in asked)
    *_, last, done = filter(None, stream.text.split("\n\n"))
    assert done == "data: [DONE]"
    assert whole.json()["usage"]["total_tokens"] == 32 * 16, whole.text
    assert json.loads(last.removeprefix("data: "))["usage"]["total_tokens"] == 32 * 16
    assert {choice["finish_reason"] for choice in two.json()["choices"]} == {"length"}
    refused = httpx.post(chat, json=body | {"max_tokens": 600}).json()["error"]["message"]
    assert "is 512 tokens (what a worker can hold; the model's own is 4096)" in refused


@pytest.fixture
def small_queue(tmp_path, echo_folder):
    """A cell that computes four sequences at once and lets four wait."""
    with make_cell(
        tmp_path,
        echo_folder,
        workers=1,
        scheduler=["--max-num-queued-reqs=4"],
        worker=["--max-num-seqs=4", "--step-seconds=0.01"],
    ).running() as cell:
        yield cell
        cell.settle()


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_who_is_too_many_is_told_at_once(small_queue, questions, times):
    """Of `times` as many as there is room for, those who are let in get all they came for."""
    asked = [questions.ask("seeded", 40, 60) for _ in range(8 * times)]

    async def run():
        return await asyncio.gather(*(ask(small_queue.server, question) for question in asked))

    answers = asyncio.run(run())
    verdicts = {answer.verdict for answer in answers}
    assert verdicts == {EXACT, REFUSED}
    assert sum(answer.verdict == EXACT for answer in answers) >= 4
    refused = [answer for answer in answers if answer.verdict == REFUSED]
    assert all(answer.error.startswith("HTTP 503") for answer in refused)
