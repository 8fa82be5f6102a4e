"""Gateways that share a port show the sums of their metrics, whichever is asked."""

import asyncio
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pagefleet_gateway.telemetry import metrics_exchange
from pagefleet_gateway.telemetry.metrics_exchange import MetricsExchange, Sums


def text(counted: dict[str, int], observed: list[float]) -> bytes:
    """What a gateway has that counted and observed this."""
    registry = CollectorRegistry()
    counter = Counter("requests", "Of all kinds.", ["kind"], registry=registry)
    for kind, count in counted.items():
        counter.labels(kind).inc(count)
    histogram = Histogram("seconds", "That they took.", buckets=(1, 2), registry=registry)
    for value in observed:
        histogram.observe(value)
    return generate_latest(registry)


def lines(content: bytes) -> set[str]:
    created = ("requests_created", "seconds_created", "# HELP", "# TYPE")
    return {line for line in content.decode().splitlines() if not line.startswith(created)}


def test_sums_are_what_one_gateway_would_have_counted() -> None:
    parts = [text({"a": 2, "b": 1}, [0.5, 1.5]), text({"b": 4}, [3.0]), text({}, [])]
    one = text({"a": 2, "b": 5}, [0.5, 1.5, 3.0])
    summed = generate_latest(Sums(part.decode() for part in parts))
    assert lines(summed) == lines(one)
    assert b"# TYPE requests_total counter" in summed
    assert b"created" not in summed


def test_who_is_gone_or_hangs_is_left_out(tmp_path: Path) -> None:
    async def gathered() -> list[str]:
        first = MetricsExchange(tmp_path, lambda: b"first")
        second = MetricsExchange(tmp_path, lambda: b"second" * 10_000)
        async with first.running(), second.running():
            return await first.gather()

    (tmp_path / "m00000001").touch()
    with ExitStack() as stack:
        for name in ("m00000002", "m00000003", "mysqld.sock"):
            left = stack.enter_context(socket.socket(socket.AF_UNIX))
            left.bind(str(tmp_path / name))
            if name == "m00000002":
                left.listen()
        texts = asyncio.run(gathered())
    assert texts[0] == "first"
    assert sorted(filter(None, texts[1:])) == ["second" * 10_000]
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"m00000001", "m00000002", "mysqld.sock"}


@pytest.mark.parametrize("whole_folder", [True, False])
def test_who_was_deleted_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_folder: bool
) -> None:
    async def gathered() -> list[str]:
        first, second = (MetricsExchange(folder, lambda n=n: n) for n in (b"first", b"second"))
        async with first.running(), second.running():
            assert await first.gather() == ["first", "second"]
            shutil.rmtree(folder)
            if not whole_folder:
                folder.mkdir()
            while len(list(folder.glob("m*"))) < 2:
                await asyncio.sleep(0.001)
            return await first.gather() + await second.gather()

    monkeypatch.setattr(metrics_exchange, "LOOK_SECONDS", 0.001)
    folder = tmp_path / "metrics"
    assert asyncio.run(gathered()) == ["first", "second", "second", "first"]
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("/proc/metrics", "No such file"), ("x" * 110, "too long"), (__file__, "exists")],
)
def test_a_folder_that_will_not_do_is_named(tmp_path: Path, folder: str, reason: str) -> None:
    asked = tmp_path / folder
    with pytest.raises(OSError, match=f"--metrics-folder {asked}: .*{reason}.*; name another"):
        MetricsExchange(asked, bytes)
