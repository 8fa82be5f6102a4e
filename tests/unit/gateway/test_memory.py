"""`/memory`: the scheduler's snapshot by name, or 503 while there is none."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.http.app import build_app, build_gateway
from tests.unit.gateway.fake_scheduler import FakeScheduler
from tests.unit.gateway.served import echo_model


async def ask(endpoint: str, *paths: str, seconds: float = 5.0) -> list[httpx.Response]:
    """Ask a gateway that has met its scheduler, or has given it so many seconds to come."""
    gateway = build_gateway(GatewaySettings(gateway_endpoint=endpoint), echo_model())
    transport = httpx.ASGITransport(build_app(gateway))
    async with (
        gateway.client.running(),
        httpx.AsyncClient(transport=transport, base_url="http://cell") as http,
    ):
        deadline = time.monotonic() + seconds
        while not gateway.client.health.scheduler and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return list(await asyncio.gather(*(http.get(path) for path in paths)))


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/gateways.sock"


def test_a_snapshot_is_told_by_name(endpoint: str) -> None:
    with FakeScheduler(endpoint).started():
        plain, mapped = asyncio.run(ask(endpoint, "/memory", "/memory?blocks=true"))
    (pool,) = plain.json()["workers"]
    assert pool == {
        "engine": 3, "running": 2, "slots": 8, "block_size": 16, "blocks": 6, "free": 2,
        "cached": 1, "holders": {"1": 2, "12": 1}, "empty_slots": 5, "host_blocks": 0,
        "host_cached": 0, "copies": 1, "preemptions": 2, "swapped_out": 3, "swapped_in": 4,
        "map": "",
    }  # fmt: skip
    assert mapped.json()["workers"] == [pool | {"map": "..c11+"}]
    (waiting,) = plain.json()["waiting"]
    assert waiting == {
        "request": "r", "choices": [0, 1], "seconds": 1.5, "tokens": 20, "losses": 1,
        "reason": "blocks", "wanted": 6, "available": 5,
    }  # fmt: skip


def test_without_a_scheduler_it_says_so(endpoint: str) -> None:
    (response,) = asyncio.run(ask(endpoint, "/memory", seconds=0))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_scheduler"
