"""The life of a request to one of the two generation routes.

It is read (bounded), understood in a thread (JSON, template, tokenizer), handed to the scheduler,
and answered as its tokens come in: as events of a stream, or as one body. Whoever hangs up is
noticed at once, in plain requests too, and what is generated for them is aborted. Until the first
news comes, or a stream has waited so long that its client must be told, an error is an HTTP status;
after that it is the stream's last event.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Receive, Scope, Send

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.answer import Answer
from pagefleet_gateway.choice import Piece
from pagefleet_gateway.client import ClientGone, Mailbox, SchedulerClient
from pagefleet_gateway.errors import ApiError, unavailable
from pagefleet_gateway.generation import Generation, Limits
from pagefleet_gateway.guard import read_body, send_error
from pagefleet_gateway.metrics import Metrics, RequestTimer
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.stream import KEEP_ALIVE, Renderer, failure

KEEP_ALIVE_SECONDS: Final = 10.0
"""Without news, after which a stream says that it still waits."""

DRAINING: Final = "This server is shutting down."

_THREADS: Final = 4
_MAX_NAMES: Final = 16

_Headers = list[tuple[bytes, bytes]]


@dataclass
class Gateway:
    """What all requests share."""

    settings: GatewaySettings
    model: ServedModel
    client: SchedulerClient
    metrics: Metrics
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS))
    keep_alive: float = KEEP_ALIVE_SECONDS
    draining: bool = False
    """It finishes what it has, and takes nothing more."""

    def drain(self) -> None:
        """Take nothing more, and give up what is not finished after the settings' time."""
        self.draining = True
        loop = asyncio.get_running_loop()
        loop.call_later(self.settings.shutdown_timeout, self.client.refuse_all, DRAINING)

    @property
    def limits(self) -> Limits:
        """For a request that comes now."""
        longest = self.model.manifest.max_model_len
        return Limits(min(longest, self.client.max_model_len or longest), key=self.settings.api_key)


class GenerationRoute:
    """ASGI endpoint of one route; `understand` is what it makes of a request's body."""

    def __init__(
        self,
        gateway: Gateway,
        understand: Callable[[bytes, ServedModel, Limits], Generation],
    ) -> None:
        self._gateway = gateway
        self._understand = understand

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await self._serve(scope, receive, send)
        except ClientGone:
            return
        except ApiError as error:
            self._gateway.metrics.error(error.status, error.code)
            await send_error(send, error)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        began = time.monotonic()
        if gateway.draining:
            raise unavailable(DRAINING, "draining")
        content = await read_body(scope, receive, gateway.settings.max_body_bytes)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(gateway.threads, self._begin, content)
        generation = answer.generation
        headers = [(b"x-request-id", _request_id(scope, generation))]
        if generation.ignored:
            headers.append((b"x-ignored-fields", _shown(generation.ignored)))
        renderer = Renderer(answer, gateway.model, int(time.time()))
        async with (
            gateway.client.open(generation.submits) as mailbox,
            _watching(receive, mailbox),
        ):
            run = Run(gateway, answer, mailbox, RequestTimer(gateway.metrics, began))
            if generation.body.stream:
                await _send_stream(run, renderer, headers, send)
            else:
                await _send_whole(run, renderer, headers, send)

    def _begin(self, content: bytes) -> Answer:
        model = self._gateway.model
        return Answer(self._understand(content, model, self._gateway.limits), model)


@dataclass
class Run:
    """A request that is being generated."""

    gateway: Gateway
    answer: Answer
    mailbox: Mailbox
    timer: RequestTimer

    async def pieces(self) -> Mapping[int, Piece] | None:
        """What becomes certain next; None where nothing came for `keep_alive`.

        Raises:
            ApiError: the request was refused, or failed.
            ClientGone: nobody waits for it any more.
        """
        news = await self.mailbox.take(self.gateway.keep_alive)
        if not news:
            return None
        pieces = self.answer.take(news)
        for request, index in self.answer.cut_choices(pieces):
            self.gateway.client.end_choices(request, [index])
        now = time.monotonic()
        self.timer.arrived(pieces, now)
        if self.answer.finished:
            self.timer.ended(self.answer, now)
        return pieces


async def _send_whole(run: Run, renderer: Renderer, headers: _Headers, send: Send) -> None:
    parts: dict[int, list[Piece]] = defaultdict(list)
    while not run.answer.finished:
        for index, piece in (await run.pieces() or {}).items():
            parts[index].append(piece)
    body = renderer.whole({index: Piece.joined(pieces) for index, pieces in parts.items()})
    length = (b"content-length", str(len(body)).encode())
    await _start(send, b"application/json", [*headers, length])
    await send({"type": "http.response.body", "body": body})


async def _send_stream(run: Run, renderer: Renderer, headers: _Headers, send: Send) -> None:
    pieces = await run.pieces()
    await _start(
        send, b"text/event-stream; charset=utf-8", [*headers, (b"cache-control", b"no-cache")]
    )
    await _send_part(send, renderer.start())
    try:
        while True:
            await _send_part(send, KEEP_ALIVE if pieces is None else renderer.events(pieces))
            if run.answer.finished:
                break
            pieces = await run.pieces()
    except ApiError as error:
        run.gateway.metrics.error(error.status, error.code)
        await _send_part(send, failure(error))
    await send({"type": "http.response.body", "body": b""})


async def _start(send: Send, content_type: bytes, headers: _Headers) -> None:
    headers = [(b"content-type", content_type), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, content: bytes) -> None:
    if content:
        await send({"type": "http.response.body", "body": content, "more_body": True})


@asynccontextmanager
async def _watching(receive: Receive, mailbox: Mailbox) -> AsyncIterator[None]:
    """Hang the mailbox up as soon as the client has left."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        mailbox.hang_up()

    watcher = asyncio.create_task(until_gone())
    try:
        yield
    finally:
        watcher.cancel()


def _request_id(scope: Scope, generation: Generation) -> bytes:
    """The client's own name for the request, if it gave one that is fit for a header."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    if 0 < len(given) <= 128 and given.isascii() and given.decode().isprintable():
        return given
    return generation.id.encode("ascii", "replace")


def _shown(names: list[str]) -> bytes:
    """Names for a header; those that are not fit for one are left out."""
    fit = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 64]
    shown = fit[:_MAX_NAMES]
    return ", ".join(shown if len(shown) == len(names) else [*shown, "..."]).encode()
