"""The outermost layer of the application: every request gets a name, a key's tenant and a log line.

Whatever is answered carries `X-Request-Id`, to clients of Anthropic's API `Request-Id` too. As
soon as there are keys, requests need one on every route but `OPEN_PATHS`, known or not, and that
of an admin on `ADMIN_PATHS`. The log tells sizes and times; prompts and answers are in it only with
`--log-prompts`. Whatever is sent with a body is traced, if anything is (`tracing`).
"""

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagefleet_gateway.error_form import speaks_messages
from pagefleet_gateway.errors import http_error
from pagefleet_gateway.http.guard import send_error
from pagefleet_gateway.record import Record, begin, record_of
from pagefleet_gateway.telemetry.metrics import Metrics
from pagefleet_gateway.tenants import Keyring, Tenant

if TYPE_CHECKING:
    from pagefleet_gateway.telemetry.tracing import Tracer

_LOG = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/", "/live", "/ready", "/health"})
"""Answered without a key."""

ADMIN_PATHS: Final = frozenset({"/metrics", "/memory"})
"""Tell of all tenants: answered with an admin's key only."""


class Edge:
    """Wraps the application; `root_path` is what a proxy before it leaves in front of paths."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        root_path: str = "",
        tracer: "Tracer | None" = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "://" in (path := scope["path"]) and not path.startswith("/"):
            # The absolute form of a target, which servers must take (RFC 9112, section 3.2.2).
            scope["path"] = "/" + path.partition("://")[2].partition("/")[2]
        if self._root_path and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"
        record = begin(scope, time.monotonic())
        headers = [(b"x-request-id", record.id.encode())]
        if speaks_messages(scope):
            headers.append((b"request-id", record.id.encode()))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            self._ended(scope, record)

    def _ended(self, scope: Scope, record: Record) -> None:
        now = time.monotonic()
        self._metrics.answered(record)
        if self._tracer is not None and scope["method"] == "POST":
            self._tracer.ended(scope, record, now)
        level = logging.DEBUG if scope["method"] == "GET" else logging.INFO
        if _LOG.isEnabledFor(level):
            _LOG.log(level, "%s", _line(scope, record, now - record.began))


class KeyGuard:
    """Lets requests pass that carry a key of the ring, and those to `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "http" and not self._keyring.is_open:
            tenant, path = self._holder(scope), scope["path"]
            if tenant is not None:
                record_of(scope).tenant = tenant
            elif path not in OPEN_PATHS:
                text = (
                    "The request needs the header `Authorization: Bearer KEY` or `X-Api-Key: KEY` "
                    "with a valid key."
                )
                await send_error(scope, send, http_error(401, text, "invalid_api_key"))
                return
            if tenant is not None and path in ADMIN_PATHS and not tenant.is_admin:
                text = f"{path} tells of all keys: it needs one with `admin = true` in their file."
                await send_error(scope, send, http_error(403, text, "not_admin"))
                return
        await self._app(scope, receive, send)

    def _holder(self, scope: Scope) -> Tenant | None:
        """Whose key it is; of two keys that of `Authorization`, if it is one."""
        headers, now = dict(scope["headers"]), time.monotonic()
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = [key.strip()] if scheme.lower() == b"bearer" else []
        if (key := headers.get(b"x-api-key")) is not None:
            keys.append(key)
        return next(filter(None, (self._keyring.find(key, now) for key in keys)), None)


def _line(scope: Scope, record: Record, seconds: float) -> str:
    """`name=value` pairs; a value with anything but plain characters is written as JSON."""
    pairs: dict[str, Any] = {
        "request": record.id,
        "method": scope["method"],
        "path": scope["path"],
        "status": record.status or "none",
        "seconds": f"{seconds:.3f}",
    }
    optional = {
        "tenant": record.tenant.name,
        "lora": record.adapter,
        "error": record.error,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens,
        "prompts": record.prompts,
        "answers": record.answers,
    }
    pairs |= {name: value for name, value in optional.items() if value}
    return " ".join(f"{name}={_value(value)}" for name, value in pairs.items())


def _value(value: object) -> str:
    text = str(value)
    if isinstance(value, str | int) and text.isascii() and text.isprintable() and " " not in text:
        return text
    return msgspec.json.encode(value).decode()
