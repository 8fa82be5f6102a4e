"""ZeroMQ, with the settings that make it honest: a hub for the scheduler, peers for all others.

What goes wrong with the defaults, and what is done here against it:

- A ROUTER drops messages to unknown peers without a word: ROUTER_MANDATORY.
- A socket that closes waits for ever: LINGER is 0.
- Messages queue for a peer that was never there: IMMEDIATE.
- A link that died silently is not noticed: heartbeats every 300 ms.
- A blocking send to one full peer stalls all others: sends never block, and a full peer counts as
  lost.
- A second connection with a known identity is ignored for ever, though it answers heartbeats. So a
  peer that comes back before its old connection is known to be closed, as after the hub was stopped
  for a second, would never be heard again: ROUTER_HANDOVER. Identities are random per start.
- A connection that ended because of what the other end said (it has another key, is another service
  that was given the port, sent too large a frame) is never made again: peers do it themselves.

What is set right about Unix sockets is in listening.py.

A frame is one message. An address beyond the machine needs the cell's key (cell_key.py): with it,
all TCP is encrypted, and admits only those who have it too (gate.py). Unix sockets need no key, and
loopback addresses need none if the cell has none. Over a network more can be lost: a peer gives up
a connection that is not made, or a handshake that is not answered, within seconds, and tries again.
"""

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from pagefleet import faultpoints
from pagefleet.cell_key import CellKey
from pagefleet.endpoint import EndpointError, check_endpoint
from pagefleet.gate import HANDSHAKE_FAILED, HANDSHAKE_MS, Gate, public_key, watch
from pagefleet.listening import Listener

MAX_FRAME_BYTES = 64 * 2**20
"""A larger message closes the connection it came on."""

QUEUE_LENGTH = 10_000
"""Messages that may wait for one peer before it counts as lost."""

MOST_AT_ONCE = 1_000
"""Frames that a hub returns at once. A new scheduler is sent all requests of its cell; in between
it has to say that it lives, and to answer workers.
"""

_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 300, 900
_RENEWAL_SECONDS = 0.5  # that libzmq has to make a lost connection again, before we do
_CONNECT_MS = 1000  # that an attempt to connect may take; the system's own waits double each time
_BACKLOG = 2048  # TCP connections that may wait to be accepted: strangers may come in crowds

_FATE = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
"""What can become of a peer's connection, besides a handshake that fails."""

_Socket: TypeAlias = "zmq.Socket[bytes]"


class Hub:
    """The scheduler's end: one socket, any number of peers, known by the identities they chose.

    It listens at one endpoint or several; at TCP ones behind the `gate`, if there is one.

    Raises:
        EndpointError: an endpoint is refused or taken.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        context: "zmq.Context[zmq.Socket[bytes]]",
        gate: Gate | None = None,
    ) -> None:
        asked = [endpoints] if isinstance(endpoints, str) else endpoints
        key = gate.key if gate else None
        remote = [each for each in asked if check_endpoint(each, key).startswith("tcp://")]
        self._listeners: list[Listener] = []
        self.socket = _prepare(context.socket(zmq.ROUTER))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            for endpoint in asked:
                if endpoint not in remote:
                    self._listeners.append(Listener(self.socket, endpoint))
            if remote and gate is not None:
                gate.guard(self.socket)
            for endpoint in remote:
                _prepare_tcp(self.socket, "[" in endpoint)
                self._listeners.append(Listener(self.socket, endpoint))
        except EndpointError:
            self.close()
            raise

    def stay_found(self, now: float) -> None:
        """See `Listener.stay_found`."""
        for listener in self._listeners:
            listener.stay_found(now)

    def receive(self) -> list[tuple[bytes, bytes]]:
        """(identity, frame) of up to `MOST_AT_ONCE` frames that have arrived; does not wait."""
        arrived: list[tuple[bytes, bytes]] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(MOST_AT_ONCE):
                parts = self.socket.recv_multipart(zmq.DONTWAIT)
                if len(parts) == 2:
                    arrived.append((parts[0], parts[1]))
        return arrived

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Hand a frame to a peer's queue; False if the peer is gone or takes no more."""
        try:
            for each in faultpoints.passing("hub.send", frame):
                self.socket.send_multipart([identity, each], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close at once; what is still queued is lost."""
        self.socket.close()
        for listener in self._listeners:
            listener.close()


class Peer:
    """A gateway's or a worker's end, which connects, and connects again, by itself.

    To TCP addresses it connects under the cell's key, if there is one.

    Raises:
        EndpointError: the endpoint is refused.
    """

    def __init__(
        self,
        endpoint: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
        key: CellKey | None = None,
    ) -> None:
        self._endpoint = check_endpoint(endpoint, key)
        self._refused = False
        self._lost: float | None = None
        """When the connection ended, if libzmq has not tried to make it again."""
        self.socket = _prepare(context.socket(zmq.DEALER))
        self.socket.setsockopt(zmq.IDENTITY, os.urandom(16))
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if endpoint.startswith("tcp://"):
            _prepare_tcp(self.socket, _is_ipv6(endpoint))
            if key is not None:
                _use_key(self.socket, key)
        self._monitor = watch(self.socket, _FATE)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"{endpoint}: cannot connect there: {error}") from error

    def silence(self, option: str) -> str:
        """Why nobody answers, as far as is known; `option` is what names the endpoint."""
        self._learn()
        if self._refused:
            return (
                f"{self._endpoint} does not let this process in: give it by --cell-key a copy of "
                "the file that the scheduler has as that"
            )
        elsewhere = f"if there is one elsewhere, name it by {option}"
        return f"no scheduler answers at {self._endpoint}; {elsewhere}"

    def receive(self) -> list[bytes]:
        """All frames that have arrived; does not wait."""
        frames: list[bytes] = []
        while True:
            try:
                frames.append(self.socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                return frames

    def send(self, frame: bytes) -> bool:
        """Hand a frame to the queue; False if there is no connection or the queue is full."""
        try:
            for each in faultpoints.passing("peer.send", frame):
                self.socket.send(each, zmq.DONTWAIT)
        except zmq.Again:
            self._learn()
            return False
        return True

    def close(self) -> None:
        """Close at once; what is still queued is lost."""
        self.socket.close()
        self._monitor.close()

    def _learn(self) -> None:
        """Learn what became of the connection; make it again if libzmq does not."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    self._lost = time.monotonic()
                elif event == zmq.EVENT_CONNECT_RETRIED:
                    self._lost = None
                else:
                    self._refused = bool(event & HANDSHAKE_FAILED)
        if self._lost is not None and time.monotonic() - self._lost >= _RENEWAL_SECONDS:
            self._lost = None
            self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)


def _prepare(socket: _Socket) -> _Socket:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
    socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    return socket


def _is_ipv6(endpoint: str) -> bool:
    """Whether only IPv6 addresses lead there; libzmq tries addresses of one kind only."""
    try:
        found = socket.getaddrinfo(urlsplit(endpoint).hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # the name is not known yet, or is none
    return all(family == socket.AF_INET6 for family, *_ in found)


def _prepare_tcp(socket: _Socket, ipv6: bool) -> None:
    socket.setsockopt(zmq.IPV6, ipv6)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)


def _use_key(socket: _Socket, key: CellKey) -> None:
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(key.peer))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key(key.peer))
    socket.setsockopt(zmq.CURVE_SERVERKEY, public_key(key.hub))
