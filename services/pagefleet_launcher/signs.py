"""Signs of life of a child: the listening end of `pagefleet.notify`, with one socket per process.

The socket has an abstract name that the kernel chooses (unix(7), autobind), so that there is no
file to clean up. Any process of the machine could write to it; so the kernel names the sender of
every message (SO_PASSCRED), and only the child's own count.
"""

import asyncio
import socket
import struct

from pagefleet.notify import READY

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred` of unix(7): pid, uid, gid."""

_LONGEST_WORD = 4096


class Signs:
    """Signs of life of one process.

    address: what the process finds in its environment under `notify.ADDRESS`.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")
        self.address = "@" + self._socket.getsockname()[1:].decode()
        self.count = 0
        """How many have come."""
        self.ready = asyncio.Event()
        """Set by the first sign that says so."""

    def __repr__(self) -> str:
        return f"<Signs {self.count}{', ready' * self.ready.is_set()}>"

    def listen(self, pid: int) -> None:
        """Count the signs of this process, those that have come already included."""
        asyncio.get_running_loop().add_reader(self._socket, self._receive, pid)

    def close(self) -> None:
        """Listen no more."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _receive(self, pid: int) -> None:
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        word, credentials, _, _ = self._socket.recvmsg(_LONGEST_WORD, space)
        if not any(_CREDENTIALS.unpack(data)[0] == pid for _, _, data in credentials):
            return
        self.count += 1
        if READY in word.splitlines():
            self.ready.set()
