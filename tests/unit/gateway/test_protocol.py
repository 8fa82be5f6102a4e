"""Connections: how many, how slow, and what is no HTTP; with a real server in this process."""

import asyncio
import json
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from pagefleet_gateway.http.protocol import SEND_PART, UNREAD_BYTES, UNSENT_BYTES, GuardedProtocol


class Hasty(GuardedProtocol):
    """Gives a header little time."""

    header_seconds = 0.2
    stuck_seconds = 0.2
    max_connections = 2


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """The smallest application."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Sends until nobody is there."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    assert (await receive())["type"] == "http.request"
    gone = asyncio.create_task(receive())
    while not gone.done():
        await send({"type": "http.response.body", "body": b"x" * 10**5, "more_body": True})
        await asyncio.sleep(0)


class Patient(Hasty):
    """Gives a header more time than a test takes."""

    header_seconds = 60


@asynccontextmanager
async def serving(
    app: Any = hello, protocol: Any = Hasty, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, int]]:
    """A server that gives little time; its address."""
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    made = partial(protocol, config, state, {})
    server = await loop.create_server(made, "127.0.0.1", 0, ssl=tls)
    async with server, asyncio.timeout(60):
        yield server.sockets[0].getsockname()


async def exchange(*parts: bytes | float, app: Any = hello) -> bytes:
    """What a server answers to bytes and pauses (seconds) until it closes the connection."""
    async with serving(app) as address:
        reader, writer = await asyncio.open_connection(*address)
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
    [
        (b"\x16\x03\x01 no http\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, 431),
    ],
)
def test_what_is_no_http_is_refused_in_the_form_of_the_api(content: bytes, expected: int) -> None:
    status, error = status_and_error(asyncio.run(exchange(content)))
    assert status == expected
    assert error["type"] == "invalid_request_error"


TO_MESSAGES = [
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/messages/count_tokens?beta=true HTTP/1.1\r\nHost: x\r\n",
    b"POST http://x/behind/v1/messages HTTP/1.1\r\nHost: x\r\n",
    b"GET /v1/models HTTP/1.1\r\nAnthropic-Version: 2023-06-01\r\nHost: x\r\n",
]
TO_OTHERS = [
    b"POST /v1/messages",
    b"POST /v1/messages_of_others HTTP/1.1\r\nHost: x\r\n",
    b"GET /?of=/v1/messages HTTP/1.1\r\nHost: x\r\n",
    b"GET / HTTP/1.1\r\nX: anthropic-version:\r\nHost: x\r\n",
]


def of_messages(answer: bytes) -> tuple[int, Any]:
    """The status of an error in the form of Anthropic's API, and its type."""
    status, error = status_and_error(answer)
    told = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (told["type"], told["request_id"], "param" in error) == ("error", None, False)
    return status, error["type"]


@pytest.mark.parametrize("head", TO_MESSAGES)
@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (b"X: y", (408, "timeout_error")),
        (b"X: " + b"y" * 100_000, (431, "invalid_request_error")),
    ],
)
def test_a_refusal_of_what_asks_for_anthropics_form_has_it(
    head: bytes, rest: bytes, expected: tuple[int, str]
) -> None:
    assert of_messages(asyncio.run(exchange(head + rest))) == expected


@pytest.mark.parametrize("head", [TO_MESSAGES[0], TO_MESSAGES[-1]])
def test_so_has_one_of_a_body_that_breaks_off_in_nonsense(head: bytes) -> None:
    rest = b"Transfer-Encoding: chunked\r\n\r\nno size\r\n"
    answer = asyncio.run(exchange(head + rest, app=answering(False)))
    assert of_messages(answer) == (400, "invalid_request_error")


@pytest.mark.parametrize("head", TO_OTHERS)
def test_a_refusal_of_what_asks_for_another_route_has_openais_form(head: bytes) -> None:
    status, error = status_and_error(asyncio.run(exchange(head)))
    assert (status, error["code"]) == (408, "header_timeout")


@pytest.mark.parametrize(
    ("origins", "readable"), [("*", True), ("https://a.org,https://b.org", True), (None, False)]
)
def test_pages_can_read_a_refusal_where_any_may_ask(origins: str | None, readable: bool) -> None:
    async def refused() -> bytes:
        async with serving(protocol=GuardedProtocol.limited(0, origins)) as address:
            reader, writer = await asyncio.open_connection(*address)
            answer = await reader.read()
            writer.close()
        return answer

    head, _, _ = asyncio.run(refused()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert (b"\r\naccess-control-allow-origin: *" in head) == readable


def answering(begins_early: bool) -> Any:
    """An application that reads the whole body, and begins to answer before or after."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if begins_early:
            await send(start)
        while (await receive()).get("more_body", False):
            pass
        if not begins_early:
            await send(start)
        await send({"type": "http.response.body", "body": b"hello"})

    return answer


@pytest.mark.parametrize("begins_early", [False, True])
def test_a_body_that_breaks_off_in_nonsense_is_answered_once(
    caplog: pytest.LogCaptureFixture, begins_early: bool
) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = asyncio.run(exchange(head, 0.1, b"no size\r\n", app=answering(begins_early)))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200" if begins_early else b"HTTP/1.1 400")
    assert b"hello" not in answer
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(*address, limit=1000)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def test_one_connection_too_many_is_refused_at_once() -> None:
    async def connect() -> tuple[bytes, bytes]:
        async with serving(protocol=Patient) as address, connected(address) as (reader, writer):
            async with connected(address), connected(address) as (third, _):
                refusal = await third.read()
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return refusal, await reader.read()

    refusal, answer = asyncio.run(connect())
    status, error = status_and_error(refusal)
    assert (status, error["code"]) == (503, "too_many_connections")
    assert b"200 OK" in answer


def test_a_client_that_takes_nothing_is_cut() -> None:
    async def read() -> bytes:
        async with serving(endless) as address, connected(address) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.6)
            return await reader.read()

    taken = asyncio.run(read())
    assert taken.startswith(b"HTTP/1.1 200 OK")


@asynccontextmanager
async def reading_little(address: tuple[str, int]) -> AsyncIterator[socket.socket]:
    """A client that has asked, and has room for little; what it does not read waits elsewhere."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        yield sock


def sending(body: bytes) -> Any:
    async def send_at_once(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return send_at_once


def part_sender(directly: bool, scope: Any, send: Any) -> Any:
    async def send_part(content: bytes) -> None:
        await send({"type": "http.response.body", "body": content, "more_body": True})

    return scope["state"][SEND_PART] if directly else send_part


@pytest.mark.parametrize("directly", [False, True])
def test_little_waits_for_a_client_that_takes_nothing(directly: bool) -> None:
    sent = 0

    async def talkative(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent < 10**7:
            await part_sender(directly, scope, send)(b"x" * 1000)
            sent += 1000
            await asyncio.sleep(0)

    async def ask() -> None:
        async with serving(talkative, Patient) as address, reading_little(address):
            await asyncio.sleep(0.15)

    asyncio.run(ask())
    assert sent < 2 * (UNREAD_BYTES + UNSENT_BYTES)


def test_parts_that_are_sent_directly_are_the_same_bytes() -> None:
    parts = [os.urandom(size) for size in (1, 0, 15, 16, 255, 4096, 70_000)]

    async def ask(directly: bool) -> bytes:
        async def in_parts(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in parts:
                await part_sender(directly, scope, send)(part)
            await send({"type": "http.response.body", "body": b""})

        asked = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        return re.sub(rb"date: [^\r]*", b"", await exchange(asked, app=in_parts))

    assert asyncio.run(ask(True)) == asyncio.run(ask(False))


def telling(cut: asyncio.Event) -> type[Hasty]:
    """A protocol that tells when a connection has ended."""

    class Told(Hasty):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            cut.set()

    return Told


def test_a_client_that_leaves_the_end_of_its_answer_is_cut() -> None:
    async def ask() -> None:
        cut = asyncio.Event()
        body = b"x" * (UNREAD_BYTES + UNSENT_BYTES // 2)
        async with serving(sending(body), telling(cut)) as address, reading_little(address):
            async with asyncio.timeout(5):
                await cut.wait()

    asyncio.run(ask())


def test_a_client_that_reads_nothing_over_tls_is_cut() -> None:
    """By the same watch, though asyncio gives the end of such a connection a time of its own."""

    async def ask() -> None:
        cut = asyncio.Event()
        certificate = Path(__file__).with_name("localhost.pem")
        ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        ours.load_cert_chain(certificate)
        theirs = ssl.create_default_context(cafile=certificate)
        theirs.check_hostname = False
        async with serving(sending(b"x" * 10**7), telling(cut), ours) as address:
            _, writer = await asyncio.open_connection(*address, ssl=theirs, limit=1000)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            async with asyncio.timeout(5):
                await cut.wait()
            writer.transport.abort()

    asyncio.run(ask())


def test_a_client_that_reads_a_long_answer_slowly_gets_all_of_it() -> None:
    async def read() -> int:
        loop, taken = asyncio.get_running_loop(), 0
        async with serving(sending(b"x" * 10**6)) as address, reading_little(address) as sock:
            while part := await loop.sock_recv(sock, 50_000):
                taken += len(part)
                await asyncio.sleep(len(part) / 10**6)
        return taken

    assert asyncio.run(read()) > 10**6


def test_a_request_that_was_answered_does_not_trickle_on() -> None:
    async def trickle() -> bool:
        async with serving() as address, connected(address) as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
            await reader.readuntil(b"hello")
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
            with suppress(ConnectionError):
                await reading
            return True

    assert asyncio.run(trickle())
