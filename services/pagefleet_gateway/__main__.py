"""`python -m pagefleet_gateway`: one gateway process."""

import asyncio
import logging
import math
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn

from pagefleet.cell_key import CellKeyError
from pagefleet.command_line import parse, refuse
from pagefleet.endpoint import EndpointError, check_endpoint
from pagefleet.http_socket import HttpSocketError, http_socket
from pagefleet.manifest import ManifestError
from pagefleet.notify import BEAT_SECONDS, Notifier
from pagefleet.observe import configure_logging
from pagefleet.prepared import prepared_folder
from pagefleet.settings import GatewaySettings
from pagefleet_gateway.http.app import TracingError, build_app, build_gateway
from pagefleet_gateway.http.gateway import DRAINING, Gateway
from pagefleet_gateway.http.protocol import CLOSE, HEADER_BYTES, IDLE_SECONDS, GuardedProtocol
from pagefleet_gateway.model import NamesError, ServedModel
from pagefleet_gateway.sandbox.template import ChatTemplateError
from pagefleet_gateway.tenants import KeyFileError
from pagefleet_gateway.text.vocabulary import VocabularyError

_LOG = logging.getLogger(__name__)

_OWN_DESCRIPTORS = 256
_LOOK_SECONDS = 0.05
"""Between two looks at whether all connections have ended."""

_ARRIVAL_SECONDS = 1.0
"""Until connections that are accepted are counted: a TLS handshake may be under way."""

_FAREWELL_SECONDS = 1.0
"""That clients have to take the last words of a gateway that ends at once."""

_FAILURES = (
    *(EndpointError, CellKeyError, ManifestError, VocabularyError, ChatTemplateError, KeyFileError),
    *(NamesError, TracingError, HttpSocketError, OSError),
)


class Server(uvicorn.Server):
    """uvicorn, with the gateway's own ways to end.

    SIGTERM and SIGINT make it refuse new work, finish what it has, and end; a second one, or the
    end of the settings' time, ends all that is open with an error. SIGHUP is for a gateway whose
    successor listens at the same socket already: it accepts no connection any more, and answers
    whatever comes over those that it has until they end.

    Raises:
        OSError: the certificate or its key cannot be used.
    """

    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
            raise OSError("--ssl-keyfile needs --ssl-certfile, the certificate of this key.")
        config = uvicorn.Config(
            build_app(gateway),
            http=GuardedProtocol.limited(
                settings.max_connections, settings.allowed_origins, gateway.metrics.refused
            ),
            loop="pagefleet_gateway.http.loop:GatewayLoop",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES,
            timeout_keep_alive=IDLE_SECONDS,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout + _FAREWELL_SECONDS) + 1,
        )
        try:
            config.load()
        except OSError as error:
            files = f"{settings.ssl_certfile} and {settings.ssl_keyfile or 'its key there'}"
            raise OSError(f"HTTPS is not possible with {files}: {error}.") from error
        super().__init__(config)
        self._gateway = gateway

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends it, and give signs of life meanwhile."""
        beating = asyncio.create_task(self._beat())
        try:
            await super().serve(sockets)
        finally:
            beating.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the connections of a gateway that hands over end by themselves, then end the rest."""
        if not self._gateway.draining:
            await self._hand_over()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals as the class says."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._leave)
        yield

    async def _beat(self) -> None:
        with closing(Notifier()) as notifier:
            while True:
                ready = self.started and self._gateway.client.health.scheduler
                notifier.beat(time.monotonic(), ready=ready)
                await asyncio.sleep(BEAT_SECONDS)

    async def _hand_over(self) -> None:
        for server in self.servers:
            server.close()
        for connection in self.server_state.connections:
            if isinstance(connection, GuardedProtocol):
                connection.end_with_answer()
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        await asyncio.sleep(_ARRIVAL_SECONDS)
        while self.server_state.connections and not self._gateway.draining:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)

    def _leave(self) -> None:
        self.should_exit = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._gateway.settings.shutdown_timeout, self._give_up)

    def _stop(self) -> None:
        self.should_exit = True
        if self._gateway.draining:
            self._give_up()
            return
        self._gateway.draining = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._gateway.settings.shutdown_timeout, self._give_up)

    def _give_up(self) -> None:
        """End what is open with an error, and cut off whoever does not take that."""
        self._gateway.draining = True
        self._gateway.client.refuse_all(DRAINING)
        asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def main() -> None:
    """Serve until told to stop."""
    settings = parse(GatewaySettings, sys.argv[1:], prog="pagefleet gateway")
    configure_logging("gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        check_endpoint(settings.gateway_endpoint, settings.load_cell_key())
        model = ServedModel.load(
            prepared_folder(settings),
            settings.served_model_name,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
            chat_template=Path(settings.chat_template) if settings.chat_template else None,
            seed=settings.seed,
        )
        server = Server(build_gateway(settings, model))
        listener = http_socket(settings)
    except _FAILURES as error:
        refuse("pagefleet gateway", error)
    _allow_descriptors(settings.max_connections + _OWN_DESCRIPTORS)
    _LOG.info(
        "Listening for requests to %s at %s.", model.name, _address(listener, server.config.is_ssl)
    )
    server.run(sockets=[listener])


def _allow_descriptors(wanted: int) -> None:
    """Let this process have so many open at once, as far as the system's limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _address(listener: socket.socket, is_tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


if __name__ == "__main__":
    main()
