"""What a message between the scheduler and its peers costs: Unix sockets, TCP, and TCP under a key.

A peer sends a frame, the hub sends it back. Both ends are here, each with libzmq's threads of its
own, and one waits for the other: the time of a round trip is latency, and the processor's time that
it takes is that of both ends, two messages each. Ways take turns, round by round.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from statistics import median, quantiles

import zmq

from pagefleet.cell_key import CellKey
from pagefleet.gate import Gate
from pagefleet.transport import Hub, Peer

WAYS = ("ipc", "tcp", "tcp under a key")


@contextmanager
def connected(way: str, folder: str) -> Iterator[tuple[Hub, Peer]]:
    """A hub and its peer."""
    key = CellKey(os.urandom(32)) if way == "tcp under a key" else None
    endpoint = f"ipc://{folder}/hub" if way == "ipc" else "tcp://127.0.0.1:*"
    with ExitStack() as stack:
        at_hub, at_peer = (stack.enter_context(zmq.Context()) for _ in range(2))
        gate = stack.enter_context(closing(Gate(key, at_hub))) if key else None
        hub = stack.enter_context(closing(Hub(endpoint, at_hub, gate)))
        if gate is not None:
            gate.start()
        bound = hub.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        peer = stack.enter_context(closing(Peer(bound, at_peer, key)))
        while not peer.send(b"hello"):
            peer.socket.poll(10, zmq.POLLOUT)
        hub.socket.poll()
        hub.receive()
        yield hub, peer


def round_trip(hub: Hub, peer: Peer, frame: bytes) -> tuple[float, float]:
    """Seconds, and seconds of the processor, to the hub and back."""
    began, used = time.perf_counter(), time.process_time()
    peer.send(frame)
    hub.socket.poll()
    [(identity, arrived)] = hub.receive()
    hub.send(identity, arrived)
    peer.socket.poll()
    [_] = peer.receive()
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    """Print a line for every way and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="100,1000,10000,100000", help="bytes of a frame")
    parser.add_argument("--trips", type=int, default=2000, help="for each way and size")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ends = {way: stack.enter_context(connected(way, folder)) for way in WAYS}
        print("bytes    way               round trip p50 / p99, us    processor, us")
        for size in map(int, options.sizes.split(",")):
            frame, trips = os.urandom(size), {way: list[tuple[float, float]]() for way in WAYS}
            for _ in range(options.trips):
                for way, (hub, peer) in ends.items():
                    trips[way].append(round_trip(hub, peer, frame))
            for way, pairs in trips.items():
                lasted, used = ([1e6 * each for each in part] for part in zip(*pairs, strict=True))
                late = quantiles(lasted, n=100)[98]
                trip = f"{median(lasted):.0f} / {late:.0f}"
                print(f"{size:<8} {way:16} {trip:>25} {median(used):16.0f}")


if __name__ == "__main__":
    main()
