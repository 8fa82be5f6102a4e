"""Many clients at once on the default model, over HTTP and through real processes."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.system.conftest import TEXT
from tests.system.serving import Serving

CLIENTS = 64
LEAVERS = 50
STEPS_TO_FREE = 40
"""Ten times what they take by themselves, up to the pulse that tells of it."""

STEPS = "vllm:iteration_tokens_total_count"

Body = dict[str, Any]
Answer = dict[int, tuple[str, list[int], str | None]]
"""Text, tokens and finish reason of each choice."""


def some_body(number: int) -> Body:
    """A request: every other one a chat, some sampled, some with several choices or a stop."""
    words = TEXT.split()
    start = random.randrange(len(words) - 12)
    text = " ".join(words[start : start + random.randint(1, 12)])
    body: Body = {
        "max_tokens": random.randint(1, 16),
        "temperature": random.choice([0, 1]),
        "seed": random.randrange(2**32),
        "n": random.choice([1, 1, 1, 3]),
        "stop": random.choice([None, None, " the", "."]),
        "return_token_ids": True,
    }
    if number % 2:
        return body | {"messages": [{"role": "user", "content": text}]}
    return body | {"prompt": text}


def route(body: Body) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def client_of(server: Serving) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None)
    )


async def ask(client: httpx.AsyncClient, body: Body) -> Answer:
    response = await client.post(route(body), json=body)
    assert response.status_code == 200, response.text
    return {
        choice["index"]: (
            choice["message"]["content"] if "messages" in body else choice["text"],
            choice["token_ids"],
            choice["finish_reason"],
        )
        for choice in response.json()["choices"]
    }


async def events(response: httpx.Response) -> AsyncIterator[Body]:
    assert response.status_code == 200
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def ask_for_stream(client: httpx.AsyncClient, body: Body) -> Answer:
    given: Answer = {}
    async with client.stream("POST", route(body), json=body | {"stream": True}) as response:
        async for event in events(response):
            for choice in event["choices"]:
                text, tokens, finish = given.get(choice["index"], ("", [], None))
                assert finish is None, "something came after the end"
                piece = choice["delta"].get("content") if "messages" in body else choice["text"]
                text, tokens = text + (piece or ""), tokens + (choice.get("token_ids") or [])
                given[choice["index"]] = (text, tokens, choice["finish_reason"])
    return given


def test_streams_are_the_whole_answers(server: Serving) -> None:
    bodies = [some_body(number) for number in range(CLIENTS)]
    print("bodies", bodies)

    async def run() -> tuple[list[Answer], list[Answer]]:
        async with client_of(server) as client:
            streamed = await asyncio.gather(*[ask_for_stream(client, body) for body in bodies])
            whole = await asyncio.gather(*[ask(client, body) for body in bodies])
            return streamed, whole

    streamed, whole = asyncio.run(run())
    assert streamed == whole
    for body, answer in zip(bodies, streamed, strict=True):
        assert sorted(answer) == list(range(body["n"]))
        assert all(finish in ("stop", "length") for _, _, finish in answer.values())


async def leave_in_the_middle(
    client: httpx.AsyncClient, number: int, everybody: asyncio.Barrier
) -> None:
    """Wait until every client of a stream has got something, and hang up."""
    body = some_body(number) | {"max_tokens": 1000, "ignore_eos": True, "stop": None}
    if number % 5 == 0:
        asked = asyncio.create_task(client.post(route(body), json=body))
        await everybody.wait()
        asked.cancel()
        return
    async with client.stream("POST", route(body), json=body | {"stream": True}) as response:
        await anext(events(response))
        await everybody.wait()


def test_clients_that_leave_free_their_blocks(server: Serving) -> None:
    async def run() -> float:
        everybody = asyncio.Barrier(LEAVERS + 1)
        async with client_of(server) as client, asyncio.TaskGroup() as group:
            for number in range(LEAVERS):
                group.create_task(leave_in_the_middle(client, number, everybody))
            while everybody.n_waiting < LEAVERS:
                await asyncio.sleep(0.01)
            held = await asyncio.to_thread(server.figure, "vllm:kv_cache_usage_perc")
            await everybody.wait()
        return held

    assert asyncio.run(run()) > 0
    began, steps = time.monotonic(), server.figure(STEPS)
    while server.figure("vllm:kv_cache_usage_perc") > 0:
        assert server.figure(STEPS) - steps < STEPS_TO_FREE
    print(f"all blocks are free {time.monotonic() - began:.3f} s and", end=" ")
    print(f"{server.figure(STEPS) - steps:.0f} steps after {LEAVERS} clients left")
    assert server.figure("vllm:num_requests_running") == 0
    assert server.figure("vllm:num_requests_waiting") == 0
