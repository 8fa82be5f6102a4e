"""The life of a request to one of the generation routes.

It is read (bounded), understood in a thread (JSON, template, tokenizer), handed to the scheduler,
and answered as its tokens come in: as events of a stream, or as one body. Whoever hangs up is
noticed at once, in plain requests too, and what is generated for them is aborted. Until the first
news comes, or a stream has waited so long that its client must be told, an error is an HTTP status;
after that it is the stream's last event.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.types import Receive, Scope, Send

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.cell.client import ClientGone, Mailbox
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.gateway import Gateway
from pagefleet_gateway.http.guard import PostRoute, ignored_header
from pagefleet_gateway.http.protocol import SEND_PART
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.record import Record, record_of
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.event_renderer import EventRenderer
from pagefleet_gateway.rendering.stream import Renderer
from pagefleet_gateway.requests.generation import (
    ContextUnknown,
    Generation,
    Limits,
    resumed,
    ticket_of,
)
from pagefleet_gateway.resume import MOST_CHOICES, Ticket, read_event_id
from pagefleet_gateway.telemetry.metrics import RequestTimer

_Headers = list[tuple[bytes, bytes]]
_Renderer = Renderer | EventRenderer

_AS_IT_COMES: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Proxies are to keep nothing of a stream; the second is nginx's word for it."""


class GenerationRoute(PostRoute):
    """The endpoint of one route; `understand` is what it makes of a request's body, and `renderer`
    writes its answers.
    """

    def __init__(
        self,
        gateway: Gateway,
        understand: Callable[[bytes, ServedModel, Limits], Generation],
        renderer: type[Renderer] | type[EventRenderer] = Renderer,
    ) -> None:
        super().__init__(gateway)
        self._understand = understand
        self._renderer = renderer

    async def answer(self, content: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body is there; see `PostRoute`."""
        gateway, record = self._gateway, record_of(scope)
        last_event_id = dict(scope["headers"]).get(b"last-event-id")
        begin = partial(self._begin, content, record, last_event_id)
        loop, threads = asyncio.get_running_loop(), gateway.threads_for(content)
        try:
            answer, ticket = await loop.run_in_executor(threads, begin)
        except ContextUnknown:
            await gateway.client.until_workers_are_known()
            answer, ticket = await loop.run_in_executor(threads, begin)
        generation = answer.generation
        headers = ignored_header(generation.ignored)
        record.handed_over = time.monotonic()
        record.tenant.charge(record.prompt_tokens, record.handed_over)
        renderer = self._renderer(answer, gateway.model, ticket)
        timer = RequestTimer(gateway.metrics, record, answer)
        try:
            async with (
                gateway.client.open(generation.unfinished, generation.shrinks) as mailbox,
                _watching(receive, mailbox),
            ):
                run = Run(gateway, answer, mailbox, timer)
                if generation.body.stream:
                    # In a task of its own, which wakes without passing all that wraps this.
                    sending = _send_stream(run, renderer, headers, send, scope)
                    await asyncio.create_task(sending)
                else:
                    await _send_whole(run, renderer, headers, send)
        except ClientGone:
            timer.left()
            raise

    def _begin(
        self, content: bytes, record: Record, last_event_id: bytes | None
    ) -> tuple[Answer, str]:
        """The answer to a body, and the ticket for the ids of its events if it is a stream."""
        gateway, model, whose = self._gateway, self._gateway.model, record.tenant.digest or b""
        name = (last_event_id or b"").decode("latin-1")  # some clients send an empty one at first
        begun = read_event_id(name, gateway.resume_secret, content, whose) if name else None
        limits = self._limits(record, begun[0] if begun else None)
        generation = self._understand(content, model, limits)
        record.tenant.check_priority(generation.body.priority or 0)
        record.prompt_tokens = sum(map(len, generation.prompts))
        record.adapter = generation.model if generation.params.adapter else ""
        if gateway.settings.log_prompts:
            record.prompts = [model.tokenizer.decode(ids, False) for ids in generation.prompts]
        if begun:
            generation = resumed(generation, model, *begun)
        answer = Answer(generation, model)
        if not generation.body.stream or len(answer.choices) > MOST_CHOICES:
            return answer, ""
        context = limits.max_model_len if limits.certain else 0
        ticket = ticket_of(generation, model, whose, context)
        return answer, ticket.sign(gateway.resume_secret, content)

    def _limits(self, record: Record, ticket: Ticket | None) -> Limits:
        """What holds for a request, or held when its stream began with a ticket."""
        settings, now = self._gateway.settings, self._gateway.context
        context = ticket.context if ticket else 0
        certain = bool(context) or self._gateway.client.link.longest is not None
        return Limits(
            context or now.tokens,
            record.tenant,
            record.id,
            settings.max_choices,
            settings.max_logprobs,
            settings.strict_openai,
            now.bound,
            certain,
            ticket.created if ticket else int(time.time()),
        )


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
        if self.gateway.settings.log_prompts:
            self.timer.record.write_down({i: piece.text for i, piece in pieces.items()})
        if self.answer.finished:
            self.timer.ended(now)
        return pieces

    def sent(self, pieces: Mapping[int, Piece]) -> None:
        """The client has taken these pieces, so that more may be generated."""
        for index in pieces:
            request = self.answer.prompt_of(index).request
            self.gateway.client.taken(request, index, self.answer.choices[index].count)


async def _send_whole(run: Run, renderer: _Renderer, headers: _Headers, send: Send) -> None:
    parts: dict[int, list[Piece]] = defaultdict(list)
    while not run.answer.finished:
        for index, piece in (await run.pieces() or {}).items():
            parts[index].append(piece)
    pieces = {index: Piece.joined(pieces) for index, pieces in parts.items()}
    body = await _written(run, renderer.whole, pieces)
    length = (b"content-length", str(len(body)).encode())
    await _start(send, b"application/json", [*headers, length])
    await send({"type": "http.response.body", "body": body})


async def _send_stream(
    run: Run, renderer: _Renderer, headers: _Headers, send: Send, scope: Scope
) -> None:
    send_part = _part_sender(scope, send)
    pieces = {} if run.answer.finished else await run.pieces()
    await _start(send, b"text/event-stream; charset=utf-8", [*headers, *_AS_IT_COMES])
    await send_part(renderer.start())
    try:
        while True:
            written = None if pieces is None else await _written(run, renderer.events, pieces)
            await send_part(renderer.keep_alive if written is None else written)
            if run.answer.finished:
                break
            run.sent(pieces or {})
            pieces = await run.pieces()
    except ApiError as error:
        run.timer.record.error = error.code
        await send_part(renderer.failure(error))
    await send({"type": "http.response.body", "body": b""})


async def _written(
    run: Run, write: Callable[[Mapping[int, Piece]], bytes], pieces: Mapping[int, Piece]
) -> bytes:
    """What a renderer makes of pieces: in a thread where that may take seconds, for which all other
    streams would wait.
    """
    generation = run.answer.generation
    asked = generation.logprobs is not None and not generation.body.stream
    if generation.params.prompt_logprobs is None and not asked:
        return write(pieces)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(run.gateway.threads, write, pieces)


async def _start(send: Send, content_type: bytes, headers: _Headers) -> None:
    headers = [(b"content-type", content_type), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


def _part_sender(scope: Scope, send: Send) -> Callable[[bytes], Awaitable[None]]:
    """What sends a part of an answer: the connection itself, if it can and the answer is in chunks,
    which clients of HTTP/1.0 do not know.
    """

    async def send_part(content: bytes) -> None:
        if content:
            await send({"type": "http.response.body", "body": content, "more_body": True})

    chunked = scope["http_version"] >= "1.1"
    return scope.get("state", {}).get(SEND_PART, send_part) if chunked else send_part


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
