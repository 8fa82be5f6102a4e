"""The HTTP interface: all routes of the gateway, and every error in the API's form.

The generation routes (serving.py) are plain ASGI endpoints, so that nothing of ours wraps what a
stream sends.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.client import SchedulerClient
from pagefleet_gateway.errors import (
    ApiError,
    http_error,
    internal_error,
    unavailable,
    unknown_model,
)
from pagefleet_gateway.generation import understand_chat, understand_completion
from pagefleet_gateway.guard import KeyGuard
from pagefleet_gateway.metrics import CONTENT_TYPE, Metrics
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.responses import Model, ModelList
from pagefleet_gateway.serving import DRAINING, Gateway, GenerationRoute


def build_gateway(settings: GatewaySettings, model: ServedModel) -> Gateway:
    """What the routes work with."""
    client = SchedulerClient(settings.gateway_endpoint)
    metrics = Metrics(model.name)
    metrics.watch(client)
    return Gateway(settings, model, client, metrics)


def build_app(gateway: Gateway) -> Starlette:
    """The ASGI application; it talks to the scheduler during its lifespan."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with gateway.client.running():
            yield
        gateway.threads.shutdown(wait=False, cancel_futures=True)

    facts = Facts(gateway)
    completions = GenerationRoute(gateway, understand_completion)
    chat = GenerationRoute(gateway, understand_chat)
    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", facts.models),
            Route("/v1/models/{name:path}", facts.model),
            Route("/live", facts.live),
            Route("/ready", facts.ready),
            Route("/health", facts.health),
            Route("/metrics", facts.metrics),
            Route("/version", facts.version),
        ],
        middleware=[Middleware(KeyGuard, gateway.settings.api_key)],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )


class Facts:
    """The routes that tell of the gateway and its cell."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def models(self, request: Request) -> Response:
        """The one model that is served."""
        return _json(ModelList([self._entry()]))

    async def model(self, request: Request) -> Response:
        """The model of that name, or 404."""
        name = request.path_params["name"]
        if name != self._gateway.model.name:
            raise unknown_model(name)
        return _json(self._entry())

    async def live(self, request: Request) -> Response:
        """The process runs."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A request that comes now would be served."""
        if self._gateway.draining:
            raise unavailable(DRAINING, "draining")
        return await self.health(request)

    async def health(self, request: Request) -> Response:
        """The cell behind this gateway works: a scheduler, a worker, and progress."""
        health = self._gateway.client.health
        if health.refusal is not None:
            raise unavailable(f"The scheduler refuses this gateway: {health.refusal}", "refused")
        if not health.scheduler:
            raise unavailable("No scheduler answers.", "no_scheduler")
        if not health.workers:
            raise unavailable("No worker makes progress.", "no_worker")
        if health.stalled:
            raise unavailable("Requests wait, but nothing runs.", "stalled")
        return _json(
            {
                "status": "ok",
                "workers": health.workers,
                "running": health.running,
                "waiting": health.waiting,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self._gateway.metrics.render(), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """Of Pagefleet."""
        try:
            return _json({"version": version("pagefleet")})
        except PackageNotFoundError:
            return _json({"version": "unknown"})

    def _entry(self) -> Model:
        model = self._gateway.model
        return Model(
            id=model.name,
            created=model.created,
            root=model.manifest.name,
            max_model_len=self._gateway.limits.max_model_len,
        )


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body, error.status, headers)


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    sentence = {
        404: f"There is no route {path}.",
        405: f"{path} does not take {method}.",
    }.get(error.status_code, error.detail)
    response = _on_api_error(request, http_error(error.status_code, sentence))
    response.headers.update(error.headers or {})
    return response


def _on_bug(request: Request, error: Exception) -> Response:
    return _on_api_error(request, internal_error())
