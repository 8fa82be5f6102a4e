"""A tap on the traffic of the cell: all that the scheduler receives and sends, for `pagefleet tap`.

For each frame a msgpack array of four byte strings is published: `>` (to the scheduler) or `<`
(from it), `gateway` or `worker`, the peer's identity, and the frame as it is on the wire. The
scheduler waits for no reader: a slow one misses frames.

They are one message part and not four because libzmq 4.3.5 aborts the process if a socket is closed
while a connection has sent only some parts of a message, as to a reader that has stopped reading
(`session_base.cpp`, clean_pipes).
"""

from collections.abc import Sequence

import msgspec
import zmq

from pagefleet.endpoint import EndpointError, is_local
from pagefleet.gate import Gate
from pagefleet.listening import Listener
from pagefleet.transport import Hub


class Tap:
    """Publishes at `endpoint`.

    Raises:
        EndpointError: it cannot be listened on.
    """

    def __init__(self, endpoint: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        if not is_local(endpoint):
            raise EndpointError(
                f"{endpoint}: whoever reads a tap needs no key, so that it is for this machine "
                "only; use ipc:// or a loopback address"
            )
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._listener = Listener(self._socket, endpoint)
        except EndpointError:
            self._socket.close()
            raise

    def stay_found(self, now: float) -> None:
        """See `Listener.stay_found`."""
        self._listener.stay_found(now)

    def publish(self, *parts: bytes) -> None:
        """Send `parts`, as described above, to all readers."""
        self._socket.send(msgspec.msgpack.encode(parts), zmq.DONTWAIT)

    def close(self) -> None:
        """Publish no more."""
        self._socket.close()
        self._listener.close()


class TappedHub(Hub):
    """A hub whose traffic is published; `side` is what its peers are."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        context: "zmq.Context[zmq.Socket[bytes]]",
        gate: Gate | None,
        side: bytes,
        tap: Tap,
    ) -> None:
        super().__init__(endpoints, context, gate)
        self._side, self._tap = side, tap

    def receive(self) -> list[tuple[bytes, bytes]]:
        """As `Hub.receive`."""
        arrived = super().receive()
        for peer, frame in arrived:
            self._tap.publish(b">", self._side, peer, frame)
        return arrived

    def send(self, identity: bytes, frame: bytes) -> bool:
        """As `Hub.send`."""
        self._tap.publish(b"<", self._side, identity, frame)
        return super().send(identity, frame)
