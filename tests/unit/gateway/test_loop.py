"""Clients that never end their TLS handshake, read late, or for whom there is no descriptor."""

import asyncio
import resource
import socket
import ssl
from pathlib import Path

import pytest

from pagefleet_gateway.http.loop import GatewayLoop
from pagefleet_gateway.http.protocol import HEADER_SECONDS, STUCK_SECONDS


class HastyLoop(GatewayLoop):
    handshake_seconds = 0.1


CERTIFICATE = Path(__file__).with_name("localhost.pem")


async def tls_server(protocol: type[asyncio.Protocol]) -> asyncio.Server:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    loop = asyncio.get_running_loop()
    return await loop.create_server(protocol, "127.0.0.1", 0, ssl=context)


async def read_from_silent_handshake() -> bytes:
    """What a server with TLS answers whoever connects and says nothing."""
    async with await tls_server(asyncio.Protocol) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()


def test_a_silent_handshake_ends() -> None:
    assert GatewayLoop.handshake_seconds == HEADER_SECONDS
    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        assert runner.run(read_from_silent_handshake()) == b""


class Farewell(asyncio.Protocol):
    """Says a lot, and closes."""

    length = 10**7

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"x" * self.length)
        transport.close()


async def read_late() -> int:
    """How much of a farewell reaches a client that begins to read when it is long closed."""
    context = ssl.create_default_context(cafile=CERTIFICATE)
    context.check_hostname = False
    async with await tls_server(Farewell) as server:
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address, ssl=context, limit=1000)
        await asyncio.sleep(0.5)
        taken = 0
        try:
            while part := await reader.read(1 << 16):
                taken += len(part)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
        return taken


class TerseLoop(GatewayLoop):
    shutdown_seconds = 0.1


def test_a_slow_reader_has_longer_than_asyncio_gives_it() -> None:
    """It is watched (`protocol`), and not given so many seconds for all that is left."""
    assert GatewayLoop.shutdown_seconds > 2 * STUCK_SECONDS
    for loop, whole in ((TerseLoop, False), (GatewayLoop, True)):
        with asyncio.Runner(loop_factory=loop) as runner:
            assert (runner.run(read_late()) == Farewell.length) == whole


async def accept_without_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    """Have a client wait for a descriptor, until that was said, and then accept it."""
    accepted = asyncio.Event()

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.set()
            transport.close()

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            server = await asyncio.get_running_loop().create_server(Accepting, sock=listener)
            while not caplog.messages:
                await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        async with server:
            await asyncio.wait_for(accepted.wait(), 30)


def test_a_want_of_descriptors_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Asyncio alone fills disks: 43,000 times in three seconds, with 150 clients."""
    with asyncio.Runner(loop_factory=GatewayLoop) as runner:
        runner.run(accept_without_descriptors(caplog))
    # asyncio tries again after a second, and says so if the server is closed by then
    (said,) = [each for each in caplog.messages if "_start_serving" not in each]
    assert said.startswith("Connections wait to be accepted: Too many open files.")
