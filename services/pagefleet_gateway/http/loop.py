"""The event loop of a gateway."""

import asyncio
import logging
from typing import Any, ClassVar

from pagefleet_gateway.http.protocol import HEADER_SECONDS

_LOG = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""Between two lines of the log about connections that cannot be accepted."""

_EXHAUSTED = "socket.accept() out of system resource"
"""What asyncio says, six lines each time, as often a second as its queue is long."""


class GatewayLoop(asyncio.SelectorEventLoop):
    """asyncio's own, with other times for TLS.

    A handshake has as long as a header, and not a minute: until it is done there is no connection
    that `protocol` could watch. The end of a connection, in which the rest of an answer is sent,
    has more than half a minute: that is watched.
    """

    handshake_seconds: ClassVar[float] = HEADER_SECONDS
    shutdown_seconds: ClassVar[float] = 3600.0
    _quiet_until = 0.0

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        """See asyncio."""
        if kwargs.get("ssl") is not None:
            kwargs.setdefault("ssl_handshake_timeout", self.handshake_seconds)
            kwargs.setdefault("ssl_shutdown_timeout", self.shutdown_seconds)
        return await super().create_server(*args, **kwargs)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See asyncio."""
        if context.get("message") != _EXHAUSTED:
            super().call_exception_handler(context)
        elif self.time() >= self._quiet_until:
            self._quiet_until = self.time() + QUIET_SECONDS
            _LOG.error(
                "Connections wait to be accepted: %s. Allow this process more of them (ulimit -n).",
                context["exception"].strerror,
            )
