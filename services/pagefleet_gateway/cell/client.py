"""The socket and the clock around `SchedulerLink`: what the HTTP side talks to.

What the scheduler sends is taken in by the event loop's reader, and a task beats. News of a request
goes into the mailbox of whoever opened it; an HTTP request with several prompts has one mailbox for
all of them, and takes everything out that came in since it last looked.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from itertools import count

import zmq

from pagefleet.cell_key import CellKey
from pagefleet.transport import Peer
from pagefleet.wire import (
    Inspect,
    Pulse,
    Reason,
    Rejected,
    Snapshot,
    Submit,
    WireError,
    decode_to_gateway,
    encode,
)
from pagefleet_gateway.cell.link import (
    BEAT_SECONDS,
    PATIENCE_SECONDS,
    SILENCE_SECONDS,
    News,
    Reaction,
    SchedulerLink,
)
from pagefleet_gateway.cell.outputs import size
from pagefleet_gateway.errors import unavailable
from pagefleet_gateway.tenants import Keyring

_LOG = logging.getLogger(__name__)


ALONE_SECONDS = 2.0
"""Without a scheduler, after which the gateway says so."""

TURN_BYTES = 1 << 15
"""Of news (`outputs.size`) that one request takes at once, which is some 10 ms of work; then it is
the turn of others."""

TURN_SUBMITS = 64
"""That one request hands over before it is the turn of others; it has up to 2,048."""


class ClientGone(Exception):
    """Whoever asked is no longer there to be answered."""


@dataclass(slots=True, eq=False)
class Mailbox:
    """News on their way from the link to one HTTP request."""

    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """Asked for once, because Python makes a system call for the answer."""
    _news: deque[News] = field(default_factory=deque)
    _waiter: "asyncio.Future[None] | None" = None
    _gone: bool = False
    _due: float = 0.0
    """When whoever waits is told that nothing came."""
    _alarm: asyncio.TimerHandle | None = None
    """Rings at `_due` or before: it is not set anew for every wait, of which there is one a token,
    but goes on when it finds that it is too early."""

    def put(self, news: News) -> None:
        """Add to what waits."""
        self._news.append(news)
        self._wake()

    def hang_up(self) -> None:
        """Make whoever takes, now or later, raise `ClientGone`."""
        self._gone = True
        self._wake()

    async def take(self, seconds: float) -> list[News]:
        """What came in since the last time, some `TURN_BYTES` of it at most, behind whatever else
        the loop has to do; nothing if nothing comes for so many seconds.

        Raises:
            ClientGone: the mailbox was hung up.
        """
        if self._news:
            await asyncio.sleep(0)
        elif not self._gone:
            self._waiter = self._loop.create_future()
            self._due = self._loop.time() + seconds
            if self._alarm is None:
                self._alarm = self._loop.call_at(self._due, self._ring)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._gone:
            raise ClientGone
        news, taken = [], 0
        while self._news and taken < TURN_BYTES:
            news.append(self._news.popleft())
            taken += size(news[-1])
        return news

    def close(self) -> None:
        """Nobody will take any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _ring(self) -> None:
        self._alarm = None
        if self._waiter is None:
            return
        if self._loop.time() < self._due:
            self._alarm = self._loop.call_at(self._due, self._ring)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True)
class CellHealth:
    """What this gateway knows of the cell behind it."""

    scheduler: bool
    """The scheduler answers."""
    workers: int
    """Workers that make progress."""
    running: int
    waiting: int
    stalled: bool
    """Requests wait, and nothing has run for seconds."""
    refusal: str | None
    """Why the scheduler does not take this gateway."""


class SchedulerClient:
    """The gateway's link to the scheduler, running."""

    def __init__(
        self,
        endpoint: str,
        keyring: Keyring | None = None,
        key: CellKey | None = None,
        fingerprint: str = "",
    ) -> None:
        self.link = SchedulerLink(time.monotonic(), fingerprint)
        self._endpoint, self._key = endpoint, key
        self._alone: float | None = time.monotonic()
        """Since when no scheduler answers, unless it has said so."""
        self._keyring = Keyring() if keyring is None else keyring
        self._mailboxes: dict[str, Mailbox] = {}
        self._queries = count(1)
        self._inspections: dict[int, asyncio.Future[Snapshot]] = {}
        self._workers_known = asyncio.Event()
        self._peer: Peer | None = None

    @property
    def health(self) -> CellHealth:
        """As of now."""
        alive = self.link.alive(time.monotonic())
        pulse = self.link.pulse if alive else None
        return CellHealth(
            scheduler=alive,
            workers=pulse.workers if pulse else 0,
            running=pulse.running if pulse else 0,
            waiting=pulse.waiting if pulse else 0,
            stalled=pulse is not None and pulse.stalled,
            refusal=self.link.refusal,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Talk to the scheduler as long as the context lasts; then take leave."""
        loop = asyncio.get_running_loop()
        with zmq.Context() as context, closing(Peer(self._endpoint, context, self._key)) as peer:
            self._peer = peer
            loop.add_reader(peer.socket.FD, self._receive)
            beats = loop.create_task(self._beat())
            try:
                yield
            finally:
                beats.cancel()
                self._carry_out(self.link.leave())
                loop.remove_reader(peer.socket.FD)
                self._peer = None

    @asynccontextmanager
    async def open(self, submits: list[Submit], shrink: bool = False) -> AsyncIterator[Mailbox]:
        """Hand requests over; at the end of the context, abort whatever of them still runs.

        shrink: they may be shorter, where no worker holds as much.
        """
        mailbox = Mailbox()
        try:
            for number, submit in enumerate(submits, 1):
                self._mailboxes[submit.request] = mailbox
                self._carry_out(self.link.submit(submit, time.monotonic(), shrink))
                if number % TURN_SUBMITS == 0:
                    await asyncio.sleep(0)
            yield mailbox
        finally:
            mailbox.close()
            for submit in submits:
                self._carry_out(self.link.abort(submit.request))
                self._mailboxes.pop(submit.request, None)

    def end_choices(self, request: str, choices: Iterable[int]) -> None:
        """Stop generating these choices; no more news of them will come."""
        self._carry_out(self.link.abort(request, choices))

    def taken(self, request: str, index: int, count: int) -> None:
        """The client of a stream has taken `count` tokens of a choice."""
        self._carry_out(self.link.taken(request, index, count))

    async def until_workers_are_known(self) -> None:
        """Wait until it is known what workers hold.

        Raises:
            ApiError: 503, no worker has come.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._workers_known.wait()
        except TimeoutError:
            text = f"No worker has joined for {PATIENCE_SECONDS:.0f} seconds."
            raise unavailable(text, Reason.NO_WORKER) from None

    async def inspect(self, blocks: bool) -> Snapshot:
        """How memory is used now; with `blocks`, every single one.

        Raises:
            TimeoutError: the scheduler does not answer.
        """
        query = next(self._queries)
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._inspections[query] = answer
        try:
            self._send(encode(Inspect(query, blocks)))
            async with asyncio.timeout(SILENCE_SECONDS):
                return await answer
        finally:
            del self._inspections[query]

    def refuse_all(self, text: str) -> None:
        """End every open request, saying why."""
        for request, mailbox in self._mailboxes.items():
            self._carry_out(self.link.abort(request))
            mailbox.put(Rejected(request, 0, Reason.OVERLOADED, text))

    def _receive(self) -> None:
        for frame in self._peer.receive() if self._peer else ():
            try:
                message = decode_to_gateway(frame)
            except WireError as error:
                _LOG.warning("Dropped a frame from the scheduler: %s.", error)
                continue
            if isinstance(message, Snapshot):
                self._answer_inspection(message)
            else:
                self._carry_out(self.link.handle(message, time.monotonic()))
                if self.link.longest is not None:
                    self._workers_known.set()
                if isinstance(message, Pulse) and message is self.link.pulse:
                    self._keyring.learn(message, time.monotonic())

    def _answer_inspection(self, snapshot: Snapshot) -> None:
        answer = self._inspections.get(snapshot.query)
        if answer is not None and not answer.done():
            answer.set_result(snapshot)

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            self._carry_out(self.link.tick(now, self._keyring.used()))
            self._tell_if_alone(now)
            await asyncio.sleep(BEAT_SECONDS)

    def _tell_if_alone(self, now: float) -> None:
        if self.link.alive(now):
            self._alone = now
        elif self._peer and self._alone is not None and now - self._alone > ALONE_SECONDS:
            self._alone = None
            silence = f"{self._peer.silence('--gateway-endpoint')}."
            refusal = self.link.refusal
            told = f"the scheduler refuses this gateway: {refusal}" if refusal else silence
            _LOG.warning("Requests wait: %s", told)

    def _carry_out(self, reaction: Reaction) -> None:
        for message in reaction.messages:
            self._send(encode(message))
        for news in reaction.news:
            mailbox = self._mailboxes.get(news.request)
            if mailbox is not None:
                mailbox.put(news)

    def _send(self, frame: bytes) -> None:
        if self._peer is None:
            return
        self._peer.send(frame)
        # ZeroMQ's descriptor tells of a change once: a send may have consumed the news of an
        # arrival, so the arrivals are looked at again.
        asyncio.get_running_loop().call_soon(self._receive)
