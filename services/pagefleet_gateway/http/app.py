"""The HTTP interface: all routes of the gateway, and every error in the API's form.

The routes that take a body are plain ASGI endpoints, so that little wraps what a stream sends.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.cell.client import SchedulerClient
from pagefleet_gateway.error_form import MESSAGES_PATH, error_body
from pagefleet_gateway.errors import ApiError, http_error, internal_error
from pagefleet_gateway.http.edge import Edge, KeyGuard
from pagefleet_gateway.http.facts import Facts
from pagefleet_gateway.http.gateway import Gateway
from pagefleet_gateway.http.lag import watch_lag
from pagefleet_gateway.http.memory import MemoryRoute
from pagefleet_gateway.http.openapi import document
from pagefleet_gateway.http.serving import GenerationRoute
from pagefleet_gateway.http.tokenizing import (
    TokenizerRoute,
    count_input,
    count_message,
    detokenize,
    tokenize,
)
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.record import record_of
from pagefleet_gateway.rendering.embeddings import EmbeddingRenderer
from pagefleet_gateway.rendering.messages_stream import MessageRenderer
from pagefleet_gateway.rendering.response_stream import ResponseRenderer
from pagefleet_gateway.requests.embedding_input import understand_embedding
from pagefleet_gateway.requests.messages_input import understand_message
from pagefleet_gateway.requests.response_input import understand_response
from pagefleet_gateway.requests.understanding import understand_chat, understand_completion
from pagefleet_gateway.telemetry.metrics import Metrics
from pagefleet_gateway.telemetry.metrics_exchange import MetricsExchange
from pagefleet_gateway.tenants import Keyring

if TYPE_CHECKING:
    from pagefleet_gateway.telemetry.tracing import Tracer

OTLP_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Environment variables that ask for traces."""

_ASK_AGAIN: Final = ("Retry-After", "X-Should-Retry")
_EXPOSED: Final = ("X-Request-Id", "Request-Id", "X-Ignored-Fields", *_ASK_AGAIN)
"""Headers that pages may read; by some of them SDKs decide whether to ask again."""


class TracingError(Exception):
    """Traces cannot be made; says why."""


def build_gateway(settings: GatewaySettings, model: ServedModel) -> Gateway:
    """What the routes work with.

    Raises:
        KeyFileError: the file of keys that the settings name is not usable.
        CellKeyError: nor is that of the cell's key.
        TracingError: traces are asked for, but not installed.
    """
    file = settings.api_key_file
    keyring = Keyring(settings.api_key, None if file is None else Path(file))
    cell_key = settings.load_cell_key()
    fingerprint = model.manifest.fingerprint
    client = SchedulerClient(settings.gateway_endpoint, keyring, cell_key, fingerprint)
    metrics = Metrics(model.name)
    metrics.watch(client)
    gateway = Gateway(settings, model, client, metrics, keyring)
    gateway.tracer = _tracer(settings.otlp_traces_endpoint)
    if settings.metrics_folder is not None:
        gateway.exchange = MetricsExchange(Path(settings.metrics_folder), metrics.own)
    if settings.resume_secret is not None:
        gateway.resume_secret = settings.resume_secret.encode()
    elif cell_key is not None:
        gateway.resume_secret = cell_key.resumption
    return gateway


def build_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application; it talks to the scheduler during its lifespan."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        lag = asyncio.create_task(watch_lag(gateway.metrics.event_loop_lag.observe))
        exchanging = gateway.exchange.running() if gateway.exchange else nullcontext()
        async with gateway.client.running(), exchanging:
            yield
        lag.cancel()
        for threads in (gateway.threads, gateway.large_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if gateway.tracer is not None:
            gateway.tracer.close()

    app = Starlette(
        routes=routes(gateway),
        middleware=[Middleware(KeyGuard, gateway.keyring)],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    whole = _for_pages(app, gateway.settings.allowed_origins)
    return Edge(whole, gateway.metrics, gateway.settings.root_path, gateway.tracer)


def routes(gateway: Gateway) -> list[Route]:
    """All of them; `openapi` tells of each."""
    facts = Facts(gateway)
    completions = GenerationRoute(gateway, understand_completion)
    chat = GenerationRoute(gateway, understand_chat)
    responses = GenerationRoute(gateway, understand_response, ResponseRenderer)
    messages = GenerationRoute(gateway, understand_message, MessageRenderer)
    embeddings = GenerationRoute(gateway, understand_embedding, EmbeddingRenderer)
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route(MESSAGES_PATH, messages, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/models", facts.models),
        Route("/v1/models/{name:path}", facts.model),
        *(
            Route(path, TokenizerRoute(gateway, work), methods=["POST"])
            for path, work in (
                ("/v1/responses/input_tokens", count_input),
                (f"{MESSAGES_PATH}/count_tokens", count_message),
                ("/tokenize", tokenize),
                ("/detokenize", detokenize),
            )
        ),
        Route("/openapi.json", _openapi),
        Route("/", facts.page),
        Route("/status", facts.status),
        Route("/memory", MemoryRoute(gateway).show),
        Route("/live", facts.live),
        Route("/ready", facts.ready),
        Route("/health", facts.health),
        Route("/metrics", facts.metrics),
        Route("/version", facts.version),
    ]


def _tracer(endpoint: str | None) -> "Tracer | None":
    if endpoint is None and os.environ.keys().isdisjoint(OTLP_ENDPOINTS):
        return None
    try:
        from pagefleet_gateway.telemetry.tracing import Tracer
    except ImportError as error:
        text = "Traces need what the extra `tracing` installs: pip install -e '.[tracing]'."
        raise TracingError(text) from error
    return Tracer.connect(endpoint)


async def _openapi(request: Request) -> Response:
    return Response(document(), media_type="application/json")


def _for_pages(app: ASGIApp, origins: str | None) -> ASGIApp:
    """`app` for pages of these origins too; around all of it, so that they can read its errors."""
    if origins is None:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",")],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=_EXPOSED,
    )


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    record_of(request.scope).error = error.code
    body = error_body(error, request.scope)
    headers = {name.decode(): value.decode() for name, value in error.headers(body)}
    return Response(body, error.status, headers)


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    sentence = {
        404: f"There is no route {path}.",
        405: f"{path} does not take {method}.",
    }.get(error.status_code, error.detail)
    if path.startswith("/v1/responses/"):
        sentence += " Responses are not stored, so there is none to fetch, cancel or delete."
    response = _on_api_error(request, http_error(error.status_code, sentence))
    response.headers.update(error.headers or {})
    return response


def _on_bug(request: Request, error: Exception) -> Response:
    return _on_api_error(request, internal_error())
