"""Writes of one turn of the loop: sent together, in their order, and never too many of them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagefleet_gateway.http.coalescing import MOST_PENDING, CoalescingTransport


class _Connection(asyncio.Protocol):
    """One end, which writes through the transport under test."""

    paused = False
    transport: CoalescingTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = CoalescingTransport(transport, asyncio.get_running_loop())

    def pause_writing(self) -> None:
        self.paused = True


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[_Connection, socket.socket]]:
    """A connection, and its other end, which does not wait for what is not there."""
    near, far = socket.socketpair()
    far.setblocking(False)
    with far:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, sock=near)
        yield connection, far
        connection.transport.abort()


def test_what_one_turn_writes_is_sent_when_it_is_over() -> None:
    async def main() -> None:
        async with connected() as (connection, far):
            for part in (b"header ", b"first ", b"second"):
                connection.transport.write(part)
            with pytest.raises(BlockingIOError):
                far.recv(100)
            await asyncio.sleep(0)
            assert far.recv(100) == b"header first second"
            connection.transport.write(b"third")
            await asyncio.sleep(0)
            assert far.recv(100) == b"third"

    asyncio.run(main())


def test_closing_sends_what_is_pending_and_aborting_does_not() -> None:
    async def main() -> None:
        async with connected() as (connection, far):
            connection.transport.write(b"last")
            connection.transport.close()
            assert connection.transport.is_closing()
            assert far.recv(100) == b"last"
        async with connected() as (connection, far):
            connection.transport.write(b"lost")
            connection.transport.abort()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert far.recv(100) == b""

    asyncio.run(main())


def test_whoever_writes_without_pause_is_told_to_within_the_turn() -> None:
    async def main() -> None:
        async with connected() as (connection, _):
            written = 0
            while not connection.paused and written < 100 * MOST_PENDING:
                connection.transport.write(bytes(10_000))
                written += 10_000
            assert connection.paused

    asyncio.run(main())
