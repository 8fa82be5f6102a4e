"""What connections write in one turn of the event loop, sent when the turn is over.

The tokens of a step come in together, and become an event in each of many streams. If every event
is sent as soon as it is made, each system call pushes the interpreter out of the processor's
caches, and wakes a reader that may take the processor itself. Here all events are made first, and
then sent one after the other. Besides, what a connection writes in parts, such as a header and its
first event, becomes one packet.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

MOST_PENDING: Final = 64 * 1024
"""Bytes that wait for the end of the turn; more are sent at once, so that whoever writes on and on
is told to pause."""


class CoalescingTransport(asyncio.Transport):
    """A connection whose writes are put off; `transport` is the one that sends.

    on_close: called when it is to be closed as soon as everything is sent.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._on_close = on_close
        self._pending = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send this at the end of the turn."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending += data
        if len(self._pending) > MOST_PENDING:
            self._flush()

    def close(self) -> None:
        """Send what is pending, and close."""
        if self.is_closing():
            return
        self._flush()
        self._on_close()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is pending is lost."""
        self._pending.clear()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._pending) + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """See asyncio."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See asyncio."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio."""
        return self._transport.get_extra_info(name, default)

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._transport.write(pending)
