"""The event loop of a gateway."""

import asyncio
from typing import Any, ClassVar

from pagefleet_gateway.protocol import HEADER_SECONDS


class GatewayLoop(asyncio.SelectorEventLoop):
    """asyncio's own, where a TLS handshake has as long as a header; else it would have a minute.

    Until it is done there is no connection that `protocol` could watch.
    """

    handshake_seconds: ClassVar[float] = HEADER_SECONDS

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        """See asyncio."""
        if kwargs.get("ssl") is not None:
            kwargs.setdefault("ssl_handshake_timeout", self.handshake_seconds)
        return await super().create_server(*args, **kwargs)
