"""Gateways that share a port show the sums of their metrics, whichever is asked."""

import asyncio
import socket
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pagefleet_gateway.metrics_exchange import MetricsExchange, Sums


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


async def gathered(folder: Path) -> list[str]:
    """What one of two gateways gathers."""
    first = MetricsExchange(folder, lambda: b"first")
    second = MetricsExchange(folder, lambda: b"second" * 10_000)
    second._path = folder / "m0"
    async with first.running(), second.running():
        return await first.gather()


def test_who_is_gone_or_hangs_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "m1").touch()
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "m2"))
        hung.listen()
        texts = asyncio.run(gathered(tmp_path))
    assert texts[0] == "first"
    assert sorted(filter(None, texts[1:])) == ["second" * 10_000]
    assert not (tmp_path / "m0").exists()
