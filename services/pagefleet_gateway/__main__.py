"""`python -m pagefleet_gateway`: one gateway process."""

import asyncio
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from pagefleet.manifest import ManifestError
from pagefleet.observe import configure_logging
from pagefleet.prepared import prepared_folder
from pagefleet.settings import GatewaySettings, parse, refuse
from pagefleet.transport import EndpointError, check_endpoint
from pagefleet_gateway.app import build_app, build_gateway
from pagefleet_gateway.guard import HEADER_BYTES, IDLE_SECONDS, GuardedProtocol
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.serving import Gateway
from pagefleet_gateway.template import ChatTemplateError
from pagefleet_gateway.vocabulary import VocabularyError

_LOG = logging.getLogger(__name__)

_BACKLOG = 2048


class Server(uvicorn.Server):
    """uvicorn, with signals that first make the gateway refuse new work."""

    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        config = uvicorn.Config(
            build_app(gateway),
            http=GuardedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            h11_max_incomplete_event_size=HEADER_BYTES,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout) + 1,
        )
        super().__init__(config)
        self._gateway = gateway

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at the first signal; end at once at the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.force_exit = self._gateway.draining
        self.should_exit = True
        if not self._gateway.draining:
            self._gateway.drain()


def main() -> None:
    """Serve until told to stop."""
    settings = parse(GatewaySettings, sys.argv[1:], prog="pagefleet gateway")
    configure_logging("gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        check_endpoint(settings.gateway_endpoint)
        model = ServedModel.load(prepared_folder(settings.model), settings.served_model_name)
        listener = listen(settings)
    except (EndpointError, ManifestError, VocabularyError, ChatTemplateError, OSError) as error:
        refuse("pagefleet gateway", error)
    _LOG.info("Serving %s at %s.", model.name, _address(listener))
    Server(build_gateway(settings, model)).run(sockets=[listener])


def listen(settings: GatewaySettings) -> socket.socket:
    """The listening socket that the settings ask for."""
    fd = settings.fd
    if fd is None:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        address = (settings.host, settings.port)
        fd = socket.create_server(address, family=family, backlog=_BACKLOG).detach()
    # A socket made from its number knows that its protocol is TCP; asyncio switches Nagle's
    # algorithm off only then, and with it every second small write waits 40 ms.
    return socket.socket(fileno=fd)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    main()
