"""The scheduler's shell: sockets and the clock around `core.Scheduler`."""

import logging
import os
import signal
import socket
import time
from math import ceil
from types import FrameType

import zmq

from pagefleet import faultpoints
from pagefleet.gate import Gate
from pagefleet.notify import Notifier
from pagefleet.settings import SchedulerSettings
from pagefleet.transport import Hub
from pagefleet.wire import (
    Message,
    Refused,
    WireError,
    WorkerBye,
    WorkerHello,
    decode_from_gateway,
    decode_from_worker,
    frames_of,
)
from pagefleet_scheduler.core import Arrived, Event, Lost, Scheduler, Unreachable
from pagefleet_scheduler.peers import Peers
from pagefleet_scheduler.queue import Room
from pagefleet_scheduler.tap import Tap, TappedHub
from pagefleet_scheduler.watch import ProcessWatch

log = logging.getLogger(__name__)

TICK_MS = 50


class Server:
    """Hands to the scheduler what arrives, and sends what it returns.

    Raises:
        EndpointError: an address cannot be listened on.
        CellKeyError: the cell's key is not usable.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._tap = Tap(settings.tap_endpoint, context) if settings.tap_endpoint else None
        key = settings.load_cell_key()
        self._gate = Gate(key, context) if key else None
        gateway_ends = [settings.gateway_endpoint, settings.listen_gateways]
        worker_ends = [settings.worker_endpoint, settings.listen_workers]
        self._gateways = self._hub(gateway_ends, context, b"gateway")
        self._workers = self._hub(worker_ends, context, b"worker")
        self._listening: list[Hub | Tap] = [self._gateways, self._workers]
        if self._tap is not None:
            self._listening.append(self._tap)
        if self._gate is not None:
            self._gate.start()
        self.peers = Peers()
        self._leaving: set[bytes] = set()
        """Workers that have said goodbye and whose processes have not ended yet."""
        self._watch = ProcessWatch()
        self._woken, self._waker = socket.socketpair()
        self._poller = zmq.Poller()
        for readable in (self._gateways.socket, self._workers.socket, self._woken):
            self._poller.register(readable, zmq.POLLIN)
        self._stopping = False
        self._stalled = False
        self._notifier = Notifier()
        self._scheduler = Scheduler(
            int.from_bytes(os.urandom(7), "little") << 7,
            lookahead=settings.lookahead,
            caching=settings.enable_prefix_caching,
            check=settings.check,
            room=Room(settings.max_num_queued_reqs, settings.max_num_queued_tokens),
            worker_wait=settings.worker_wait,
            drafts=settings.speculative_ngram,
            prioritized=settings.scheduling_policy == "priority",
        )

    def _hub(
        self, ends: list[str | None], context: "zmq.Context[zmq.Socket[bytes]]", side: bytes
    ) -> Hub:
        endpoints = [end for end in ends if end is not None]
        if self._tap is None:
            return Hub(endpoints, context, self._gate)
        return TappedHub(endpoints, context, self._gate, side, self._tap)

    def run(self) -> None:
        """Serve until a signal says stop.

        Raises:
            EndpointError: another process has taken an address.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        log.info("listening for gateways and workers")
        while not self._stopping:
            self.turn()
        self.close()
        log.info("stopped")

    def turn(self) -> None:
        """One turn of the main loop: wait a moment for something to do, and do it.

        Raises:
            EndpointError: another process has taken an address.
        """
        now = time.monotonic()
        self._notifier.beat(now, ready=True)
        for listening in self._listening:
            listening.stay_found(now)
        faultpoints.reach("scheduler.loop")
        self._handle(self._receive())
        self._tell_of_stall()

    def close(self) -> None:
        """Close all sockets at once."""
        self._gateways.close()
        self._workers.close()
        if self._gate is not None:
            self._gate.close()
        if self._tap is not None:
            self._tap.close()
        self._woken.close()
        self._waker.close()
        self._notifier.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            self._waker.send(b"\0")

    def _receive(self) -> list[Event]:
        due = 1e3 * (self._scheduler.due - time.monotonic())
        readable = dict(self._poller.poll(ceil(max(min(due, TICK_MS), 0))))
        events: list[Event] = []
        for hub, decode in (
            (self._gateways, decode_from_gateway),
            (self._workers, decode_from_worker),
        ):
            if hub.socket not in readable:
                continue
            for peer, frame in hub.receive():
                try:
                    message = decode(frame)
                except WireError as error:
                    log.warning("dropped a frame of %d bytes: %s", len(frame), error)
                    continue
                self.peers.hear(peer, hub)
                if isinstance(message, WorkerHello):
                    if not self._meet(peer, message):
                        continue
                elif isinstance(message, WorkerBye) and self._watch.of(peer) is not None:
                    self._leaving.add(peer)
                events.append(Arrived(peer, message))
        for fd in readable:  # after the messages: a worker that leaves says so, then ends
            if fd in self._watch:
                self._poller.unregister(fd)
                peer = self._watch.end(fd)
                events.append(Lost(peer))
                if peer in self._leaving:
                    self._leaving.remove(peer)
                    log.info("a worker has left")
                else:
                    log.warning("a worker process has ended")
        return events

    def _meet(self, peer: bytes, hello: WorkerHello) -> bool:
        """Watch who says hello; False if the word was so long on its way that it has ended."""
        try:
            pidfd = self._watch.add(peer, hello)
        except ProcessLookupError:
            log.warning("worker %d said hello, and has ended", hello.pid)
            return False
        if not self.peers.is_refused(peer):
            log.info(
                "worker %d says hello: %d blocks of %d tokens, %d slots",
                hello.pid,
                hello.blocks,
                hello.block_size,
                hello.slots,
            )
        self._leaving.discard(peer)
        if pidfd is not None:
            self._poller.register(pidfd, zmq.POLLIN)
        return True

    def _part(self, peer: bytes, text: str) -> None:
        """Stop watching a process that was refused: it may live on in another cell."""
        if not self.peers.is_refused(peer):
            self.peers.refuse(peer)
            log.warning("refused a process that wants to join: %s", text)
        if (pidfd := self._watch.of(peer)) is not None:
            self._poller.unregister(pidfd)
            self._watch.end(pidfd)

    def _tell_of_stall(self) -> None:
        """The alarm: requests are there, and no worker has computed anything for seconds."""
        stalled = self._scheduler.stalled
        if stalled and not self._stalled:
            log.error("stalled: requests wait, and nothing runs: %r", self._scheduler)
        elif self._stalled and not stalled:
            log.info("no longer stalled")
        self._stalled = stalled

    def _handle(self, events: list[Event]) -> None:
        while True:
            unreachable: list[Event] = []
            for send in self._scheduler.handle(events, time.monotonic()):
                if isinstance(send.message, Refused):
                    self._part(send.peer, send.message.text)
                if not self._send(send.peer, send.message):
                    unreachable.append(Unreachable(send.peer))
            if not unreachable:
                return
            events = unreachable

    def _send(self, peer: bytes, message: Message) -> bool:
        hub = self.peers.hub_of(peer)
        if hub is not None and all(hub.send(peer, frame) for frame in frames_of(message)):
            return True
        if self.peers.forget(peer):  # so that it is logged once
            log.info("a peer cannot be reached: %s is not sent", type(message).__name__)
        return False
