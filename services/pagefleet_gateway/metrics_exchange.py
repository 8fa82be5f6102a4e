"""One set of metrics for all gateways that share a port: each asks the others for theirs.

Whoever scrapes a shared port meets any of them, and must see the same counters rise. So each tells
its own figures on a Unix socket in a folder that they share, and answers a scrape with the sums.
One that is gone takes its counts with it; Prometheus sees that as a restart.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ASK_SECONDS: Final = 1.0
"""That another gateway has to answer."""


class MetricsExchange:
    """The place of one gateway in `folder`, where its `own` metrics can be had as text."""

    def __init__(self, folder: Path, own: Callable[[], bytes]) -> None:
        self._folder = folder
        self._path = folder / f"m{os.getpid()}"
        self._own = own

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tell the others for as long as the context lasts."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._tell, self._path)
        try:
            yield
        finally:
            server.close()
            self._path.unlink(missing_ok=True)

    async def gather(self) -> list[str]:
        """The metrics of all gateways that answer, this one's first."""
        paths = [path for path in self._folder.glob("m*") if path != self._path]
        return [self._own().decode(), *await asyncio.gather(*map(_ask, paths))]

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._own())
        writer.close()


class Sums(Collector):
    """Counters and histograms of several gateways, added up."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._families: dict[str, Metric] = {}
        self._values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in texts:
            for family in text_string_to_metric_families(text):
                self._add(family)

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for name, family in self._families.items():
            summed = Metric(name, family.documentation, family.type)
            for (sample, labels), value in self._values[name].items():
                summed.add_sample(sample, dict(labels), value)
            yield summed

    def _add(self, family: Metric) -> None:
        if family.name.endswith("_created"):
            return  # a time, of which there is no sum
        self._families.setdefault(family.name, family)
        values = self._values.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            values[key] = values.get(key, 0.0) + sample.value


async def _ask(path: Path) -> str:
    """What a gateway tells; nothing if it is gone."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return (await reader.read()).decode()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return ""
