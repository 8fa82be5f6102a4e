"""Every request with a body: who may send it, how large and slow, what of it is ignored or refused.

Starlette and uvicorn wait for ever for a body, and take any size; connections and headers are
`protocol`'s.
"""

import asyncio
import re
import time
from abc import ABC, abstractmethod
from typing import Final

from starlette.types import Receive, Scope, Send

from pagefleet_gateway.cell.client import ClientGone
from pagefleet_gateway.error_form import error_body
from pagefleet_gateway.errors import ApiError, http_error, unavailable
from pagefleet_gateway.http.gateway import DRAINING, Gateway
from pagefleet_gateway.record import record_of

BODY_SECONDS: Final = 10.0

_MAX_NAMES: Final = 16
_FIT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")


class PostRoute(ABC):
    """ASGI endpoint that takes a body, within the limits of the gateway and of the tenant."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        gateway = self._gateway
        try:
            if gateway.draining:
                raise unavailable(DRAINING, "draining")
            with record_of(scope).tenant.request(time.monotonic()):
                content = await read_body(scope, receive, gateway.settings.max_body_bytes)
                await self.answer(content, scope, receive, send)
        except ClientGone:
            return
        except ApiError as error:
            await send_error(scope, send, error)

    @abstractmethod
    async def answer(self, content: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body is there.

        Raises:
            ApiError: it is to be answered with this, and nothing was sent yet.
            ClientGone: there is nobody to answer.
        """


async def read_body(
    scope: Scope, receive: Receive, limit: int, seconds: float = BODY_SECONDS
) -> bytes:
    """The whole body of a request.

    Raises:
        ApiError: 415 if it is compressed, 413 beyond `limit` bytes, 408 after `seconds`.
        ClientGone: the client left in the middle.
    """
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if encoding.lower() != "identity":
        text = f"The body is sent with Content-Encoding {encoding}; send it as it is."
        raise http_error(415, text, "unsupported_encoding")
    too_large = http_error(413, f"The body is larger than {limit} bytes.", "body_too_large")
    declared = headers.get(b"content-length", b"0")
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


def ignored_header(names: list[str]) -> list[tuple[bytes, bytes]]:
    """The header that names fields of the body which were ignored, if there are any; names that are
    unfit for a header are left out.
    """
    if not names:
        return []
    fit = [name for name in names if _FIT.fullmatch(name)][:_MAX_NAMES]
    shown = fit if len(fit) == len(names) else [*fit, "..."]
    return [(b"x-ignored-fields", ", ".join(shown).encode())]


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer a request with nothing but an error."""
    record_of(scope).error = error.code
    body = error_body(error, scope)
    start = {"type": "http.response.start", "status": error.status, "headers": error.headers(body)}
    await send(start)
    await send({"type": "http.response.body", "body": body})
