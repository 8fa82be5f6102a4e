"""One set of metrics for all gateways that share a port: each asks the others for theirs.

Whoever scrapes a shared port meets any of them, and must see the same counters rise. So each tells
its own figures on a Unix socket in a folder that they share, and answers a scrape with the sums.
One that is gone takes its counts with it; Prometheus sees that as a restart.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ASK_SECONDS: Final = 1.0
"""That another gateway has to answer."""

_NAMES: Final = "m" + 8 * "[0-9a-f]"
"""Of the sockets: short, for a path that has one has 107 bytes at most."""

LOOK_SECONDS: Final = 1.0
"""Between two looks at whether the socket's file is still there."""


class MetricsExchange:
    """The place of one gateway in `folder`, where its `own` metrics can be had as text.

    Raises:
        OSError: it cannot be had there.
    """

    def __init__(self, folder: Path, own: Callable[[], bytes]) -> None:
        self._folder = folder
        self._path = folder / f"m{os.urandom(4).hex()}"
        self._own = own
        try:
            self._socket = self._bound()
        except OSError as error:
            raise OSError(
                f"No socket can be made in the folder of --metrics-folder {folder}: "
                f"{error.strerror or error}; name another."
            ) from error

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tell the others for as long as the context lasts."""
        telling = asyncio.create_task(self._keep_telling())
        try:
            yield
        finally:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling

    async def gather(self) -> list[str]:
        """The metrics of all gateways that answer, this one's first."""
        paths = [path for path in self._folder.glob(_NAMES) if path != self._path]
        return [self._own().decode(), *await asyncio.gather(*map(_ask, paths))]

    async def _keep_telling(self) -> None:
        """Tell whoever asks; if the file is deleted, as cleaners of /tmp do, make another."""
        while True:
            async with await asyncio.start_unix_server(self._tell, sock=self._socket):
                try:
                    while self._path.exists():  # noqa: ASYNC110
                        await asyncio.sleep(LOOK_SECONDS)
                finally:
                    self._path.unlink(missing_ok=True)
            self._socket = await self._bound_at_last()

    async def _bound_at_last(self) -> socket.socket:
        while True:
            with suppress(OSError):
                return self._bound()
            await asyncio.sleep(LOOK_SECONDS)

    def _bound(self) -> socket.socket:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        bound = socket.socket(socket.AF_UNIX)
        try:
            bound.bind(str(self._path))
        except OSError:
            bound.close()
            raise
        return bound

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
    except ConnectionRefusedError:
        _remove_left(path)
        return ""
    except (OSError, TimeoutError):
        return ""


def _remove_left(path: Path) -> None:
    """Remove the socket of one that was killed; whoever begins just now will make another."""
    if path.is_socket():
        path.unlink(missing_ok=True)
