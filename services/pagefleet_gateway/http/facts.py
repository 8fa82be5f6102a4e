"""The routes that tell of the gateway and its cell, and the JSON of their answers."""

import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagefleet_gateway.cell.client import CellHealth
from pagefleet_gateway.errors import ApiError, unavailable
from pagefleet_gateway.http.gateway import DRAINING, Gateway
from pagefleet_gateway.telemetry.dashboard import PAGE, PAGE_HEADERS, EngineStatus, Status
from pagefleet_gateway.telemetry.metrics import CONTENT_TYPE


class Live(msgspec.Struct):
    """The answer of `/live`."""

    status: Literal["ok"]


class Health(Live):
    """The answer of `/health` and `/ready`."""

    workers: int
    running: int
    waiting: int


class Version(msgspec.Struct):
    """The answer of `/version`."""

    version: str


class Model(msgspec.Struct, kw_only=True):
    """An entry of `/v1/models`, as OpenAI's clients read it, and Anthropic's.

    root: what it was made from. parent: of a LoRA adapter, the model's name.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    """The same, as RFC 3339 writes it."""
    owned_by: Literal["pagefleet"] = "pagefleet"
    root: str
    parent: str | None = None
    max_model_len: int
    max_input_tokens: int
    max_tokens: int
    """Of an answer; these two are the same as `max_model_len`."""
    capabilities: None = None


class ModelList(msgspec.Struct):
    """The answer of `/v1/models`."""

    data: list[Model]
    object: Literal["list"] = "list"
    has_more: Literal[False] = False
    first_id: str = ""
    last_id: str = ""


class Facts:
    """Endpoints that take no body."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def page(self, request: Request) -> Response:
        """The dashboard, for people."""
        return Response(PAGE, media_type="text/html", headers=PAGE_HEADERS)

    async def status(self, request: Request) -> Response:
        """What the dashboard shows."""
        gateway = self._gateway
        health, pulse = gateway.client.health, gateway.client.link.pulse
        problem = unhealthy(health)
        return as_json(
            Status(
                model=gateway.model.name,
                version=pagefleet_version(),
                state="Serving." if problem is None else problem.message,
                workers=health.workers,
                running=health.running,
                waiting=health.waiting,
                open=gateway.client.link.open_requests,
                tokens_per_second=gateway.metrics.generated.per_second(time.monotonic()),
                engines=[EngineStatus.of(stats) for stats in pulse.engines] if pulse else [],
            )
        )

    async def models(self, request: Request) -> Response:
        """The one model that is served, by all of its names, and its LoRA adapters."""
        model = self._gateway.model
        names = [*model.names, *(adapter.name for adapter in model.manifest.adapters)]
        entries = [self._entry(name) for name in names]
        return as_json(ModelList(entries, first_id=names[0], last_id=names[-1]))

    async def model(self, request: Request) -> Response:
        """The model, or the LoRA adapter, of that name, or 404."""
        return as_json(self._entry(request.path_params["name"]))

    async def live(self, request: Request) -> Response:
        """The process runs."""
        return as_json(Live("ok"))

    async def ready(self, request: Request) -> Response:
        """A request that comes now would be served."""
        if self._gateway.draining:
            raise unavailable(DRAINING, "draining")
        return await self.health(request)

    async def health(self, request: Request) -> Response:
        """The cell behind this gateway works: a scheduler, a worker, and progress."""
        health = self._gateway.client.health
        if problem := unhealthy(health):
            raise problem
        return as_json(Health("ok", health.workers, health.running, health.waiting))

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        exchange = self._gateway.exchange
        gateways = [] if exchange is None else await exchange.gather()
        return Response(self._gateway.metrics.render(gateways), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """Of Pagefleet."""
        return as_json(Version(pagefleet_version()))

    def _entry(self, name: str) -> Model:
        model, length = self._gateway.model, self._gateway.max_model_len
        asked = model.named(name)
        adapter = model.manifest.adapters[asked.adapter - 1] if asked.adapter else None
        return Model(
            id=name,
            display_name=name,
            created=model.created,
            created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            root=Path(adapter.folder).name if adapter else model.manifest.name,
            parent=model.name if adapter else None,
            max_model_len=length,
            max_input_tokens=length,
            max_tokens=length,
        )


def unhealthy(health: CellHealth) -> ApiError | None:
    """What is wrong with the cell, if anything is."""
    if health.refusal is not None:
        return unavailable(f"The scheduler refuses this gateway: {health.refusal}", "refused")
    if not health.scheduler:
        return unavailable("No scheduler answers.", "no_scheduler")
    if not health.workers:
        return unavailable("No worker makes progress.", "no_worker")
    if health.stalled:
        return unavailable("Requests wait, but nothing runs.", "stalled")
    return None


def as_json(content: msgspec.Struct) -> Response:
    """An answer of status 200."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def pagefleet_version() -> str:
    """Of the package that runs."""
    try:
        return version("pagefleet")
    except PackageNotFoundError:
        return "unknown"
