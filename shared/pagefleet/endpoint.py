"""Addresses at which the services of a cell meet, and which of them are allowed."""

import os
from urllib.parse import urlsplit

from pagefleet.cell_key import CellKey

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path, without the terminating zero: `sun_path` in unix(7)."""


class EndpointError(Exception):
    """An address that cannot or must not be used; says why."""


def check_endpoint(endpoint: str, key: CellKey | None = None) -> str:
    """Return `endpoint` if traffic to it stays on this machine, or there is a key.

    Raises:
        EndpointError: neither is so, or it is no address.
    """
    if not is_local(endpoint) and key is None:
        raise EndpointError(
            f"{endpoint}: TCP beyond this machine is refused without a key, because it would be "
            "open to everybody; give the cell's key by --cell-key (pagefleet keygen makes one), or "
            "use ipc:// or a loopback address"
        )
    return endpoint


def is_local(endpoint: str) -> bool:
    """Whether traffic to `endpoint` stays on this machine.

    Raises:
        EndpointError: it is no address.
    """
    url = urlsplit(endpoint)
    if url.scheme == "tcp":
        return url.hostname in ("127.0.0.1", "::1", "localhost")
    if url.scheme != "ipc":
        raise EndpointError(f"{endpoint}: an endpoint begins with ipc:// or tcp://")
    path = endpoint.removeprefix("ipc://")
    if path.startswith(("@", "*")):
        raise EndpointError(
            f"{endpoint}: a Unix socket without a file has no folder that would keep other users "
            "of this machine out; name a path"
        )
    if not path or len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise EndpointError(
            f"{endpoint}: a Unix socket's path has 1 to {MAX_SOCKET_PATH} bytes; choose a shorter "
            "folder"
        )
    return True
