"""Clients that behave badly, by hand over a socket."""

import contextlib
import socket

import h11


@contextlib.contextmanager
def connected(server, *, receive_buffer=None):
    """A plain socket to a gateway."""
    with socket.socket(socket.AF_INET) as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(60)
        sock.connect((server.host, server.port))
        yield sock


def send(sock, server, question):
    """Send a question whole."""
    sock.sendall(server.message(h11.Connection(h11.CLIENT), question.body))


def receive_until(sock, text):
    """Read until so much has come."""
    received = b""
    while text not in received:
        part = sock.recv(1 << 16)
        assert part, received
        received += part
    return received


def receive_all(sock):
    """Read to the end; a connection that is reset has ended too."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            received += part
    return received
