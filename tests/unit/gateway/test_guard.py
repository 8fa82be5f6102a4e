"""Limits on time and size, with a real server in this process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.app import build_gateway
from pagefleet_gateway.client import ClientGone
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.generation import understand_completion
from pagefleet_gateway.guard import read_body
from pagefleet_gateway.protocol import GuardedProtocol
from pagefleet_gateway.record import begin
from pagefleet_gateway.serving import GenerationRoute
from tests.unit.gateway.served import echo_model


class Hasty(GuardedProtocol):
    """Gives a header little time."""

    header_seconds = 0.2
    max_connections = 2


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """The smallest application."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def exchange(*parts: bytes | float) -> bytes:
    """What a server answers to bytes and pauses (seconds) until it closes the connection."""
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(hello, http=Hasty, ws="none", lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    server = await loop.create_server(lambda: Hasty(config, state, {}), "127.0.0.1", 0)
    async with server, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
            else:
                await asyncio.sleep(part)
        answer = await reader.read()
        writer.close()
    return answer


def status_and_error(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("parts", [(), (b"GET / HT", 0.15, b"TP/1.1\r\nHost:")])
def test_a_late_header_ends_the_connection(parts: tuple[bytes | float, ...]) -> None:
    status, error = status_and_error(asyncio.run(exchange(*parts)))
    assert (status, error["code"]) == (408, "header_timeout")


def test_a_second_request_has_its_own_time() -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n"
    answer = asyncio.run(exchange(request + b"\r\n", 0.3, request + b"Connection: close\r\n\r\n"))
    assert answer.count(b"200 OK") == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\x16\x03\x01 no http\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, 431)],
)
def test_what_is_no_http_is_refused_in_the_form_of_the_api(content: bytes, expected: int) -> None:
    status, error = status_and_error(asyncio.run(exchange(content)))
    assert status == expected
    assert error["type"] == "invalid_request_error"


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


SCOPE = {"type": "http", "headers": []}


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


def test_a_stream_that_waits_says_so(tmp_path: Any) -> None:
    settings = GatewaySettings(gateway_endpoint=f"ipc://{tmp_path}/none.sock")
    gateway = build_gateway(settings, echo_model())
    gateway.keep_alive = 0.02
    sent: list[dict[str, Any]] = []

    async def wait() -> None:
        body = chunk(b'{"prompt": "hello", "stream": true}', False)
        gone = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 4:
                gone.set()

        messages = [body]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = dict(SCOPE)
        begin(scope, 0.0)
        async with gateway.client.running(), asyncio.timeout(5):
            await GenerationRoute(gateway, understand_completion)(scope, receive, send)

    asyncio.run(wait())
    assert sent[0]["status"] == 200
    assert [message["body"] for message in sent[1:4]] == [b": keep-alive\n\n"] * 3
