"""An OpenAI-compatible server whose every word is written down here: the model names the script."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CACHED = 3
"""Prompt tokens of every request that the server says it had cached."""


def event(**fields) -> bytes:
    return b"data: " + json.dumps({"id": "cmpl-1", **fields}).encode() + b"\n\n"


def choice(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def turn(finish: str | None = None, **delta) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


class ScriptedServer:
    """Serves on a free port, in a thread of its own, until `close`.

    It holds all answers back until `gather` requests have come.
    """

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.gather = 0
        self.in_flight = 0
        self.most_in_flight = 0
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.completions, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), port=0, log_level="critical", lifespan="off", ws="none"
        )
        listener = config.bind_socket()
        # Connections wait from now on until the thread accepts them.
        listener.listen()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "plain"}, {"id": "pairs"}]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if body["model"] == "busy":
            return JSONResponse({"error": {"message": "at capacity"}}, status_code=503)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict) -> AsyncIterator[bytes]:
        while len(self.bodies) < self.gather:
            await asyncio.sleep(0.001)
        if "messages" in body:
            for piece in self.chat(body["max_tokens"]):
                yield piece
        else:
            async for piece in self.script(body["model"], body["max_tokens"]):
                yield piece
        # The client may ask again as soon as it has the end.
        self.in_flight -= 1
        if body["model"] != "endless":
            yield b"data: [DONE]\n\n"

    def chat(self, tokens: int) -> Iterator[bytes]:
        yield turn(role="assistant", content="")
        for _ in range(1, tokens):
            yield turn(content=" token")
        yield turn("length", content=" token")
        yield self.usage(tokens)

    async def script(self, model: str, tokens: int) -> AsyncIterator[bytes]:
        yield b": keep-alive\n\n"
        size = 2 if model == "pairs" else 1
        for _ in range(0, tokens, size):
            yield choice(" token" * size)
        if model == "broken":
            raise ConnectionAbortedError
        if model == "hangs":
            await asyncio.sleep(60)
        if model == "sorry":
            yield event(error={"message": "the worker is gone"})
        if model == "garbled":
            yield b'data: {"choices": [\n\n'
        yield choice("", "length")
        if model != "uncounted":
            yield self.usage(tokens - (model == "short"))

    def usage(self, given: int) -> bytes:
        details = {"cached_tokens": CACHED}
        usage = {"prompt_tokens": 10, "completion_tokens": given, "total_tokens": 10 + given}
        return event(choices=[], usage={**usage, "prompt_tokens_details": details})
