"""Limits on the time and size of bodies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.cell.client import ClientGone
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.app import build_gateway
from pagefleet_gateway.http.guard import read_body
from pagefleet_gateway.http.serving import GenerationRoute
from pagefleet_gateway.record import begin
from pagefleet_gateway.rendering.messages_stream import MessageRenderer
from pagefleet_gateway.requests.messages_input import understand_message
from pagefleet_gateway.requests.understanding import understand_completion
from tests.unit.gateway.served import echo_model


def receiving(*messages: dict[str, Any]) -> Callable[[], Awaitable[Any]]:
    """An ASGI `receive` that gives these messages, then none for ever."""
    queue = list(messages)

    async def receive() -> Any:
        if queue:
            return queue.pop(0)
        return await asyncio.Event().wait()

    return receive


def chunk(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


SCOPE = {"type": "http", "http_version": "1.1", "headers": []}


def test_bodies_are_read_within_limits() -> None:
    async def read(*messages: dict[str, Any]) -> bytes:
        return await read_body(SCOPE, receiving(*messages), limit=10, seconds=0.05)

    assert asyncio.run(read(chunk(b"12345", True), chunk(b"67890", False))) == b"1234567890"
    with pytest.raises(ApiError, match="larger than 10 bytes"):
        asyncio.run(read(chunk(b"12345", True), chunk(b"678901", True)))
    with pytest.raises(ApiError) as late:
        asyncio.run(read(chunk(b"12345", True)))
    assert late.value.status == 408
    with pytest.raises(ClientGone):
        asyncio.run(read(chunk(b"12345", True), {"type": "http.disconnect"}))


def test_a_compressed_body_is_refused_as_such() -> None:
    async def read(encoding: bytes) -> bytes:
        scope = {"type": "http", "headers": [(b"content-encoding", encoding)]}
        return await read_body(scope, receiving(chunk(b"{}", False)), limit=10)

    assert asyncio.run(read(b"identity")) == b"{}"
    with pytest.raises(ApiError, match="Content-Encoding gzip; send it as it is") as caught:
        asyncio.run(read(b"gzip"))
    assert caught.value.status == 415


def test_a_stream_that_waits_says_so(tmp_path: Any) -> None:
    sent = waiting(tmp_path, b'{"prompt": "hello", "stream": true}', understand_completion)
    assert sent == [b": keep-alive\n\n"] * 3


def test_a_stream_of_messages_that_waits_says_so_in_its_own_way(tmp_path: Any) -> None:
    message = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": true}'
    begun, *pings = waiting(tmp_path, message, understand_message, MessageRenderer)
    assert begun.startswith(b"event: message_start\n")
    assert pings == [b'event: ping\ndata: {"type":"ping"}\n\n'] * 2


def waiting(tmp_path: Any, body: bytes, *route: Any) -> list[bytes]:
    """What a stream begins with where no scheduler is."""
    settings = GatewaySettings(gateway_endpoint=f"ipc://{tmp_path}/none.sock")
    gateway = build_gateway(settings, echo_model())
    gateway.keep_alive = 0.02
    sent: list[dict[str, Any]] = []

    async def wait() -> None:
        gone = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 4:
                gone.set()

        messages = [chunk(body, False)]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = dict(SCOPE)
        begin(scope, 0.0)
        async with gateway.client.running(), asyncio.timeout(5):
            await GenerationRoute(gateway, *route)(scope, receive, send)

    asyncio.run(wait())
    assert sent[0]["status"] == 200
    return [message["body"] for message in sent[1:4]]
