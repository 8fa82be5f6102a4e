"""The socket that HTTP clients connect to: made here, or inherited from a supervisor."""

import errno
import socket

from pagefleet.settings import GatewaySettings

_BACKLOG = 2048
"""Connections that may wait to be accepted: while a gateway starts again, all do."""


class HttpSocketError(Exception):
    """There is no such socket, or it cannot be made; says why."""


def http_socket(settings: GatewaySettings) -> socket.socket:
    """A socket that listens at the settings' host and port, or the inherited one named by `fd`.

    Python finds out that its protocol is TCP. Only then does asyncio switch off Nagle's algorithm,
    with which every second small write waits 40 ms.

    Raises:
        HttpSocketError: it cannot be made, or is none.
    """
    host, port, fd = settings.host, settings.port, settings.fd
    if fd is None:
        fd = _listening(host, port)
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise HttpSocketError(
            f"--fd {fd} is no socket that was inherited ({error.strerror}); leave it out to listen "
            "on --host and --port."
        ) from error


def _listening(host: str, port: int) -> int:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise HttpSocketError(
                f"port {port} of {host} is in use by another program; end that one, or choose "
                "another port with --port (0 picks a free one)."
            ) from error
        raise HttpSocketError(
            f"it is not possible to listen on port {port} of {host!r}: {error.strerror}; choose "
            "others with --host and --port."
        ) from error
