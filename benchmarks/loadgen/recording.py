"""One request as it goes over the wire, recorded but not understood.

Nothing is parsed while time is being measured: a chunk costs its read and a note of the time, and
`benchmarks.loadgen.answer` makes sense of it all afterwards. Every request has a connection of its
own, which the server closes at the end.
"""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

import h11

from benchmarks.loadgen.workload import Request

_READ_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go: `path` is put before the route, like `/v1/completions`."""

    host: str
    port: int
    path: str

    @classmethod
    def at(cls, url: str) -> "Server":
        """The server at an `http://` URL.

        Raises:
            ValueError: it is none.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server; write for example http://host:8000")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"))

    def message(
        self,
        connection: h11.Connection,
        body: bytes,
        last_id: str = "",
        route: str = "/v1/completions",
    ) -> bytes:
        """The bytes of an HTTP request for a streamed answer, or its rest behind an event."""
        headers = {
            "Host": f"{self.host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Accept": "text/event-stream",
            "Connection": "close",
        }
        if last_id:
            headers["Last-Event-ID"] = last_id
        head = h11.Request(
            method="POST", target=f"{self.path}{route}", headers=list(headers.items())
        )
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(connection.send(event) or b"" for event in events)


@dataclass(slots=True)
class Recording:
    """What came back for a request that was due at `due`; times are `perf_counter` seconds.

    `failure` is the kind and the message of what ended the connection early, if anything did.
    """

    request: Request
    due: float
    connection: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    times: list[float] = field(default_factory=list)
    reads: list[bytes] = field(default_factory=list)
    ended: float = 0.0
    failure: tuple[str, str] | None = None


async def record(server: Server, request: Request, due: float, patience: float) -> Recording:
    """Send a request that was due at `due`; note all that comes within `patience` seconds."""
    recording = Recording(request, due)
    try:
        async with asyncio.timeout(patience):
            await _exchange(server, recording)
    except TimeoutError:
        recording.failure = "timeout", f"no whole answer within {patience:g} s"
    except OSError as error:
        recording.failure = "connection", str(error)
    recording.ended = perf_counter()
    return recording


async def _exchange(server: Server, recording: Recording) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        request = recording.request
        writer.write(server.message(recording.connection, request.body, route=request.route))
        while received := await reader.read(_READ_SIZE):
            recording.times.append(perf_counter())
            recording.reads.append(received)
    finally:
        writer.close()
