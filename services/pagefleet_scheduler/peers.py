"""The peers that the scheduler's shell remembers: those that it heard last.

One that ends says nothing more, and is sent nothing more: nobody would know that it can be
forgotten. A gateway or worker is heard several times a second, so that of those that count none is
among the oldest.
"""

from collections import OrderedDict
from dataclasses import dataclass

from pagefleet.transport import Hub

MOST = 10_000
"""Peers that are remembered."""


@dataclass(slots=True)
class _Peer:
    hub: Hub
    refused: bool = False


class Peers:
    """By their identities."""

    def __init__(self) -> None:
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Peers {len(self)}>"

    def __len__(self) -> int:
        return len(self._peers)

    def hear(self, identity: bytes, hub: Hub) -> None:
        """One has said something, through a hub."""
        if identity in self._peers:
            self._peers.move_to_end(identity)
            return
        self._peers[identity] = _Peer(hub)
        if len(self) > MOST:
            self._peers.popitem(last=False)

    def hub_of(self, identity: bytes) -> Hub | None:
        """Through which one is reached, if it is remembered."""
        peer = self._peers.get(identity)
        return None if peer is None else peer.hub

    def is_refused(self, identity: bytes) -> bool:
        """Whether one asks again and again, and has been told why it may not join."""
        peer = self._peers.get(identity)
        return peer is not None and peer.refused

    def refuse(self, identity: bytes) -> None:
        """One is told why it may not join."""
        if peer := self._peers.get(identity):
            peer.refused = True

    def forget(self, identity: bytes) -> bool:
        """One is gone; whether it was remembered."""
        return self._peers.pop(identity, None) is not None
