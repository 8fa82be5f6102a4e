"""Who gets in from other machines: CURVE at the hub's TCP sockets, and a list of one allowed key.

CURVE (libzmq's, rfc.zeromq.org/spec/26: X25519 and XSalsa20-Poly1305, with fresh keys for each
connection) encrypts and authenticates every frame. A client that does not know the hub's public key
gets no further than its first command, nor does one that speaks an older protocol or no mechanism.
A frame that was changed, repeated, or taken from another connection ends its connection.

But CURVE alone admits a client with any key. So libzmq asks a handler in the same process, at a
fixed address (ZAP, rfc.zeromq.org/spec/27), and the handler here admits only the key of the cell's
peers. If no handler answers, nobody gets in (ZAP_ENFORCE_DOMAIN).

Both are settings that a socket has when it begins to listen. So one socket can listen behind the
gate at TCP and without it at a Unix address, which is guarded by its folder.

What a stranger can still do: open connections, each of which is closed within `HANDSHAKE_MS`, keep
libzmq's thread busy with them, and make it hold what they send in that time; against a crowd only a
filter in the network helps. A thread of its own answers libzmq and hears what became of
connections, so that no peer waits for the scheduler, and the scheduler for no stranger. Every
`QUIET_SECONDS` at most it logs how many were refused.
"""

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from math import ceil
from typing import TypeAlias

import zmq
from zmq.utils import z85

from pagefleet.cell_key import CellKey

log = logging.getLogger(__name__)

HANDSHAKE_MS = 3000
"""Time that a connection has to show that it belongs here."""

QUIET_SECONDS = 60.0
"""Time between two lines of the log about connections that were refused."""

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_ZAP_ADDRESS, _ZAP_VERSION, _ZAP_DOMAIN = "inproc://zeromq.zap.01", b"1.0", b"cell"

_Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
_Socket: TypeAlias = "zmq.Socket[bytes]"


class Gate(threading.Thread):
    """Guards the TCP addresses of a context's hubs; to be started once all of them listen."""

    def __init__(self, key: CellKey, context: _Context) -> None:
        super().__init__(name="gate", daemon=True)
        self.key = key
        self._allowed = public_key(key.peer)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        self._monitors: list[_Socket] = []
        """They report connections that were refused."""
        self._woken, self._waker = socket.socketpair()
        self._refused, self._due = 0, 0.0

    def guard(self, hub: _Socket) -> None:
        """Guard all addresses at which a socket listens from now on, but no earlier ones."""
        hub.setsockopt(zmq.CURVE_SERVER, 1)
        hub.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self.key.hub))
        hub.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        hub.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitors.append(watch(hub))

    def run(self) -> None:
        """The thread's body; returns when the gate is closed."""
        poller = zmq.Poller()
        for readable in (self._woken, self._zap, *self._monitors):
            poller.register(readable, zmq.POLLIN)
        while True:
            wait = ceil(1e3 * max(0.0, self._due - time.monotonic())) if self._refused else None
            ready = dict(poller.poll(wait))
            if self._woken.fileno() in ready:
                return
            if self._zap in ready:
                self._zap.send_multipart(self._answer(*self._zap.recv_multipart()))
            for monitor in self._monitors:
                if monitor in ready:
                    self._follow(monitor)
            self._tell(time.monotonic())

    def close(self) -> None:
        """Let nobody in any more; the hubs must be closed before."""
        self._waker.send(b"\0")
        if self.is_alive():
            self.join()
        self._zap.close()
        for monitor in self._monitors:
            monitor.close()
        self._woken.close()
        self._waker.close()

    def _answer(self, version: bytes, number: bytes, *asked: bytes) -> list[bytes]:
        """Libzmq's question whether to admit a client, answered by its key."""
        _domain, _address, _identity, mechanism, *credentials = asked
        knows = mechanism == b"CURVE" and credentials == [z85.decode(self._allowed)]
        status = [b"200", b"OK", b"peer"] if knows else [b"400", b"another key", b""]
        return [version, number, *status, b""]

    def _follow(self, monitor: _Socket) -> None:
        with suppress(zmq.Again):
            while True:
                monitor.recv_multipart(zmq.DONTWAIT)
                self._refused += 1

    def _tell(self, now: float) -> None:
        if self._refused and now >= self._due:
            log.warning(
                "refused %d connections: whoever wants to join this cell from another machine "
                "needs the file that is its --cell-key",
                self._refused,
            )
            self._refused, self._due = 0, now + QUIET_SECONDS


def public_key(secret: bytes) -> bytes:
    """The public half (Z85, 40 bytes) of a key pair's secret half (32 bytes)."""
    return zmq.curve_public(z85.encode(secret))


def watch(watched: _Socket, events: int = 0) -> _Socket:
    """A socket that reports refused handshakes of another one, and other `events`.

    Any number of reports may wait in it: at a limit libzmq would wait for the reader, and all
    connections with it.
    """
    address = f"inproc://{os.urandom(16).hex()}"
    watched.monitor(address, HANDSHAKE_FAILED | events)
    monitor: _Socket = watched.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor
