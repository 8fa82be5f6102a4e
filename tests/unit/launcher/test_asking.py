"""What a user is told of a gateway that cannot be asked, against real servers."""

import argparse
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pagefleet_launcher.asking import Refused, Unanswered, ask, gateway_url

CERTIFICATE = Path(__file__).parents[1] / "gateway" / "localhost.pem"

KEY_IS_MISSING = b'{"error": {"message": "There is no key.", "type": "authentication_error"}}'


@contextmanager
def server(status: int, content: bytes, *, tls: bool = False, missing: int = 0) -> Iterator[int]:
    """Answers every GET on this port, though the last bytes are missing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) + missing))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Stay silent."""

    class Server(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Stay silent: handshakes fail on purpose."""

    with Server(("127.0.0.1", 0), Handler) as served:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            served.socket = context.wrap_socket(served.socket, server_side=True)
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield served.server_port
        finally:
            served.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "text", ["http://localhost:8000", "http://localhost:8000/", "http://localhost:8000/v1/"]
)
def test_an_address_may_be_that_of_the_api(text: str) -> None:
    assert gateway_url(text) == "http://localhost:8000"


@pytest.mark.parametrize("text", ["localhost:8000", "8000", "", "ftp://localhost", "http://"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write for example http://"):
        gateway_url(text)


def test_nobody_listens() -> None:
    with pytest.raises(Unanswered, match="nothing listens there; start a cell with `pagefleet"):
        ask("http://127.0.0.1:1", "/")


def test_a_missing_key() -> None:
    with server(401, KEY_IS_MISSING) as port, pytest.raises(Refused) as refused:
        ask(f"http://127.0.0.1:{port}", "/")
    assert refused.value.detail.message == "There is no key. Set PAGEFLEET_API_KEY to a key."


def test_somebody_else_answers() -> None:
    with (
        server(404, b"<html>") as port,
        pytest.raises(Refused, match="404: Not Found; is this the address"),
    ):
        ask(f"http://127.0.0.1:{port}", "/")


def test_an_error_that_breaks_off() -> None:
    with (
        server(503, KEY_IS_MISSING, missing=9) as port,
        pytest.raises(Unanswered, match="503: Service Unavailable, and breaks off"),
    ):
        ask(f"http://127.0.0.1:{port}", "/")


def test_a_certificate_that_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(200, b"{}", tls=True) as port:
        with pytest.raises(Unanswered, match="set SSL_CERT_FILE"):
            ask(f"https://localhost:{port}", "/")
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        monkeypatch.setattr("urllib.request._opener", None)  # it reads the variable when it is made
        assert ask(f"https://localhost:{port}", "/").read() == b"{}"


def test_tls_where_there_is_none() -> None:
    with (
        server(200, b"{}") as port,
        pytest.raises(Unanswered, match=r"does not speak TLS .* try http://"),
    ):
        ask(f"https://127.0.0.1:{port}", "/")
