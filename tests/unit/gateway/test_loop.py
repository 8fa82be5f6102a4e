"""A client that never ends its TLS handshake is cut off."""

import asyncio
import ssl
from pathlib import Path

from pagefleet_gateway.loop import GatewayLoop
from pagefleet_gateway.protocol import HEADER_SECONDS


class HastyLoop(GatewayLoop):
    handshake_seconds = 0.1


async def read_from_silent_handshake() -> bytes:
    """What a server with TLS answers whoever connects and says nothing."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(Path(__file__).with_name("localhost.pem"))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()


def test_a_silent_handshake_ends() -> None:
    assert GatewayLoop.handshake_seconds == HEADER_SECONDS
    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        assert runner.run(read_from_silent_handshake()) == b""
