"""The key of a cell: one file, which is on every machine of it and nowhere else.

Processes of a cell on several machines talk over CURVE (gate.py), in which each end has a key pair.
The hub's pair, and the one that all peers share, are derived from the file's 32 random bytes by
hashes with different names, so that neither reveals the other or the file. So a peer knows which
hub it must meet, the hub knows the only key that it admits, and whoever sets up a cell has one
thing to do: copy the file.

Whoever has the file belongs to the cell, and can speak for every part of it. Whoever has not cannot
join, listen, or stand in between. Whoever steals it cannot read what went over the network before,
because each connection also has fresh keys, which are gone when it ends. After a theft, make a new
file, and start the whole cell again with it.
"""

import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SECRET_BYTES = 32
_LINE = re.compile(r"pagefleet cell key ([0-9a-f]{64})\n")


class CellKeyError(ValueError):
    """A key file that cannot be used or made; says why."""


@dataclass(frozen=True, repr=False)
class CellKey:
    """What the file says."""

    _secret: bytes

    @property
    def hub(self) -> bytes:
        """The secret key of the scheduler's end (X25519, 32 bytes)."""
        return self._derived(b"pagefleet hub")

    @property
    def peer(self) -> bytes:
        """The secret key of all other ends (X25519, 32 bytes)."""
        return self._derived(b"pagefleet peer")

    @property
    def resumption(self) -> bytes:
        """The key with which gateways sign the ids that resume streams (32 bytes)."""
        return self._derived(b"pagefleet resume")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The key in a file that no other user can read.

        As with keys of PostgreSQL, a file of root's may be read by its group too.

        Raises:
            CellKeyError: there is no such file, others can read it, or it is no key.
        """
        try:
            with open(path, "rb") as file:
                about, content = os.fstat(file.fileno()), file.read(1024)
        except OSError as error:
            raise CellKeyError(
                f"the cell's key {path} cannot be read: {error.strerror}; copy it from another "
                "machine of the cell, or make the first one: pagefleet keygen FILE."
            ) from error
        if stat.S_IMODE(about.st_mode) & (0o077 if about.st_uid else 0o037):
            raise CellKeyError(
                f"others of this machine can get at the cell's key {path}: chmod 600 {path}, and "
                "make a new one if they may have done so."
            )
        match = _LINE.fullmatch(content.decode(errors="replace"))
        if match is None:
            raise CellKeyError(
                f"{path} is no key of a cell; pagefleet keygen FILE makes one, to be copied as it "
                "is."
            )
        return cls(bytes.fromhex(match[1]))

    def _derived(self, name: bytes) -> bytes:
        return hashlib.blake2b(self._secret, digest_size=_SECRET_BYTES, person=name).digest()


def make(path: str | Path) -> None:
    """Write a new key to a file that only this user can read.

    Raises:
        CellKeyError: it exists already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CellKeyError(
            f"{path} exists and is left as it is; name a file that does not."
        ) from None
    except OSError as error:
        raise CellKeyError(f"{path} cannot be written: {error.strerror}.") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"pagefleet cell key {secrets.token_hex(_SECRET_BYTES)}\n")
