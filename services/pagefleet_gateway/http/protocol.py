"""HTTP/1.1 with limits on how many clients there may be, and how slow each.

uvicorn waits for ever for a header, and for a client to read its answer. Here a header has
`HEADER_SECONDS` to be whole, a connection is idle for `IDLE_SECONDS` at most, and one that takes
nothing of its answer for `STUCK_SECONDS` is cut, whether more is to come or it is being closed.
Beyond the limit on connections, one more is answered with a 503 at once. A request that was
answered before it was whole, because of its size, its key or its slowness, has `HEADER_SECONDS` to
end, however little of it comes at a time.

Of what a client does not read, `UNSENT_BYTES` wait in the kernel, which would take megabytes, and
`UNREAD_BYTES` here; then its stream pauses. The kernel asks for more when half of its share is
gone: whoever reads less than that in `STUCK_SECONDS` takes nothing.

What is refused here is so before it is known which page asks. It tells nothing of anybody, so that
any page can read it where any page may ask at all. It has Anthropic's form if as much of the
request's head as came asks for that, and otherwise OpenAI's.
"""

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagefleet_gateway.error_form import begins_messages, messages_body, speaks_messages
from pagefleet_gateway.errors import ApiError, http_error, unavailable
from pagefleet_gateway.http.coalescing import CoalescingTransport

HEADER_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 10
STUCK_SECONDS: Final = 60.0
HEADER_BYTES: Final = 64 * 1024
UNREAD_BYTES: Final = 64 * 1024
UNSENT_BYTES: Final = 32 * 1024

CLOSE: Final = (b"connection", b"close")
"""The header of an answer with which its connection ends."""

ANY_PAGE: Final = (b"access-control-allow-origin", b"*")

SEND_PART: Final = "pagefleet.send_part"
"""Where in a request's `scope["state"]` its connection's `send_part` is."""


class GuardedProtocol(H11Protocol):
    """One connection. A subclass sets the limits."""

    max_connections: ClassVar[int]
    for_pages: ClassVar[Sequence[tuple[bytes, bytes]]] = ()
    """Headers that let pages read a refusal."""
    on_refusal: ClassVar["staticmethod[[ApiError], None]"] = staticmethod(lambda error: None)
    header_seconds: ClassVar[float] = HEADER_SECONDS
    stuck_seconds: ClassVar[float] = STUCK_SECONDS
    _header_alarm: asyncio.TimerHandle | None = None
    _stuck_alarm: asyncio.TimerHandle | None = None
    _untaken = 0
    """Bytes that the kernel had not taken when the alarm was set."""

    @classmethod
    def limited(
        cls,
        max_connections: int,
        allowed_origins: str | None = None,
        on_refusal: Callable[[ApiError], None] = lambda error: None,
    ) -> "type[GuardedProtocol]":
        """The protocol of a server with so many connections at most.

        on_refusal: told of what is answered here, of which no application knows.
        """
        limits = {
            "max_connections": max_connections,
            "for_pages": () if allowed_origins is None else (ANY_PAGE,),
            "on_refusal": staticmethod(on_refusal),
        }
        return type("LimitedProtocol", (cls,), limits)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: its first header is due."""
        transport.set_write_buffer_limits(UNREAD_BYTES)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        coalescing = CoalescingTransport(transport, self.loop, self._watch_reader)
        super().connection_made(coalescing)
        self.app_state = {**self.app_state, SEND_PART: self.send_part}
        if len(self.connections) > self.max_connections:
            self._refuse(unavailable("Too many connections are open.", "too_many_connections"))
        self._watch_header()

    def data_received(self, data: bytes) -> None:
        """Bytes came in: perhaps a header began, or is whole."""
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        self._rest()
        self._stop_watching()
        super().connection_lost(exc)
        self.resume_writing()

    async def send_part(self, content: bytes) -> None:
        """Send a part of an answer that goes in chunks, once its header is sent.

        It does what `send` would, past h11 and all that wraps `send`, which take as long at every
        token as it takes to make an event of it.
        """
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if content and not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(content), content))

    def end_with_answer(self) -> None:
        """Close the connection after the next answer that begins, and say so in its header.

        A client that is not told would ask again just when the connection is closed.
        """
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE]

    def pause_writing(self) -> None:
        """The client does not take what was sent."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching()

    def on_response_complete(self) -> None:
        """An answer is whole; its request, if it is not, has as long as a header."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(self.header_seconds, self._end_unless_read, self.cycle)

    def _end_unless_read(self, cycle: object) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.close()

    def _watch_reader(self) -> None:
        if self._stuck_alarm is None:
            self._untaken = self.transport.get_write_buffer_size()
            self._stuck_alarm = self.loop.call_later(self.stuck_seconds, self._look_at_reader)

    def _look_at_reader(self) -> None:
        self._stuck_alarm = None
        if self.transport.get_write_buffer_size() < self._untaken:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._stuck_alarm is not None:
            self._stuck_alarm.cancel()
            self._stuck_alarm = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or too much of it; called while its error is handled."""
        error = sys.exception()
        too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        self._refuse(http_error(431 if too_large else 400, str(error or msg)))

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
        """Answer with an error, unless another answer has begun, and close."""
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.on_refusal(error)
            body = messages_body(error, None) if self._speaks_messages() else error.body
            headers = [*error.headers(body), *self.for_pages, CLOSE]
            events: list[Any] = [
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ]
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _speaks_messages(self) -> bool:
        """Whether what is refused asks for Anthropic's form, as far as it was read."""
        if self.conn.our_state is h11.SEND_RESPONSE:
            return speaks_messages(dict(self.scope))
        return begins_messages(self.conn.trailing_data[0])
