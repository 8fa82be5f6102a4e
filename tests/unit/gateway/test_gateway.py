"""What requests share: a small one waits for no large one."""

import asyncio
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING

import httpx
import pytest

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.http.app import build_app, build_gateway
from tests.unit.gateway.served import echo_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import ThreadPoolExecutor


@contextmanager
def all_busy(threads: "ThreadPoolExecutor") -> "Iterator[None]":
    """Each has work, and some waits."""
    done = Event()
    for _ in range(20):
        threads.submit(done.wait)
    try:
        yield
    finally:
        done.set()
        threads.shutdown()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/tokenize", 200),
        ("/v1/responses/input_tokens", 400),
        ("/v1/completions", 400),
        ("/v1/chat/completions", 400),
        ("/v1/embeddings", 400),
    ],
)
def test_small_bodies_wait_for_no_large_ones(path: str, status: int) -> None:
    """Eight conversations of 46,000 messages kept a chat of one waiting for nine seconds."""
    settings = GatewaySettings(gateway_endpoint="ipc:///nowhere/gateways.sock")
    gateway = build_gateway(settings, echo_model())

    async def ask(characters: int) -> int:
        transport = httpx.ASGITransport(build_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "a" * characters}
            return (await client.post(path, json=body)).status_code

    async def ask_both() -> tuple[int, bool]:
        with all_busy(gateway.large_threads):
            large = asyncio.create_task(ask(300_000))
            async with asyncio.timeout(60):
                small = await ask(0)
            waited = not large.done()
        await large
        return small, waited

    assert asyncio.run(ask_both()) == (status, True)
    gateway.threads.shutdown()
