"""Where HTTP clients connect, and what is said where that cannot be had."""

import os
import socket

import pytest

from pagefleet.http_socket import HttpSocketError, http_socket
from pagefleet.settings import GatewaySettings


@pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("localhost", socket.AF_INET)],
)
def test_it_listens_where_it_is_told(host: str, family: int) -> None:
    with http_socket(GatewaySettings(host=host, port=0)) as listener:
        assert listener.family == family
        assert listener.proto == socket.IPPROTO_TCP  # else asyncio would not set TCP_NODELAY
        socket.create_connection(listener.getsockname()[:2]).close()


def test_one_that_was_inherited_is_taken_over() -> None:
    inherited = socket.create_server(("127.0.0.1", 0))
    address = inherited.getsockname()
    with http_socket(GatewaySettings(fd=inherited.detach())) as listener:
        assert listener.getsockname() == address
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("host", ["", "[::1]", "*", "nowhere.invalid", "999.1.1.1"])
def test_a_host_that_is_none(host: str) -> None:
    """An empty one least of all stands for all that this machine has."""
    with pytest.raises(HttpSocketError, match=r"^it is not possible .*; choose others with --host"):
        http_socket(GatewaySettings(host=host, port=0))


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HttpSocketError, match=f"^port {port} of 127.0.0.1 is in use by"):
            http_socket(GatewaySettings(port=port))


def test_a_descriptor_that_is_no_socket() -> None:
    with open(os.devnull) as file:
        for fd in (file.fileno(), 1 << 20):
            with pytest.raises(HttpSocketError, match=f"^--fd {fd} is no socket that was inherit"):
                http_socket(GatewaySettings(fd=fd))
