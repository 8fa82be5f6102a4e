"""What stands between the network and the routes: limits on time and size, and the key.

Starlette and uvicorn wait for ever for a request's header and body, and take bodies of any size.
Here a header and a body have `HEADER_SECONDS` and `BODY_SECONDS` to be whole, an idle connection is
closed after `IDLE_SECONDS`, and a body ends at the limit that the settings give, at the latest.
"""

import asyncio
import hashlib
import hmac
import sys
from typing import Any, Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagefleet_gateway.client import ClientGone
from pagefleet_gateway.errors import ApiError, http_error

HEADER_SECONDS: Final = 10.0
BODY_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 10
HEADER_BYTES: Final = 64 * 1024

OPEN_PATHS: Final = frozenset({"/live", "/ready", "/health"})
"""Answered without a key."""


async def read_body(
    scope: Scope, receive: Receive, limit: int, seconds: float = BODY_SECONDS
) -> bytes:
    """The whole body of a request.

    Raises:
        ApiError: 413 beyond `limit` bytes, 408 after `seconds`.
        ClientGone: the client left in the middle.
    """
    too_large = http_error(413, f"The body is larger than {limit} bytes.", "body_too_large")
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        text = f"The body was not whole after {seconds:g} seconds."
        raise http_error(408, text, "body_timeout") from None


async def send_error(send: Send, error: ApiError) -> None:
    """Answer a request with nothing but an error."""
    headers = error.headers
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body})


class KeyGuard:
    """Lets requests pass that carry the key, and those to `OPEN_PATHS`; all, if there is no key."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of ASGI."""
        if scope["type"] == "http" and not self._admits(scope):
            text = "The request needs the header `Authorization: Bearer KEY` with a valid key."
            await send_error(send, http_error(401, text, "invalid_api_key"))
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if self._digest is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(
            _digest(key.strip()), self._digest
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with a limit on the time that a header takes, and errors in the API's form."""

    header_seconds = HEADER_SECONDS
    _header_alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: its first header is due."""
        super().connection_made(transport)
        self._watch_header()

    def data_received(self, data: bytes) -> None:
        """Bytes came in: perhaps a header began, or is whole."""
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        self._rest()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or too much of it; called while its error is handled."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(http_error(status, str(error or msg)))

    def _watch_header(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._rest()
        elif self._header_alarm is None:
            self._header_alarm = self.loop.call_later(self.header_seconds, self._header_is_late)

    def _rest(self) -> None:
        if self._header_alarm is not None:
            self._header_alarm.cancel()
            self._header_alarm = None

    def _header_is_late(self) -> None:
        text = f"The header was not whole after {self.header_seconds:g} seconds."
        self._refuse(http_error(408, text, "header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        events: list[Any] = [
            h11.Response(
                status_code=error.status, headers=[*error.headers, (b"connection", b"close")]
            ),
            h11.Data(data=error.body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
