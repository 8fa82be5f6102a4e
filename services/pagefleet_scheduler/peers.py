"""The peers that the scheduler's shell remembers: those that it heard last.

Nothing tells that a peer has ended and can be forgotten. But gateways and workers are heard several
times a second, so that none of them is ever among the oldest of so many.
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
        """A peer has said something, through a hub."""
        if identity in self._peers:
            self._peers.move_to_end(identity)
            return
        self._peers[identity] = _Peer(hub)
        if len(self) > MOST:
            self._peers.popitem(last=False)

    def hub_of(self, identity: bytes) -> Hub | None:
        """The hub through which a peer is reached, if it is remembered."""
        peer = self._peers.get(identity)
        return None if peer is None else peer.hub

    def is_refused(self, identity: bytes) -> bool:
        """Whether a peer has been told that it may not join; it will ask again and again."""
        peer = self._peers.get(identity)
        return peer is not None and peer.refused

    def refuse(self, identity: bytes) -> None:
        """A peer is told that it may not join."""
        if peer := self._peers.get(identity):
            peer.refused = True

    def forget(self, identity: bytes) -> bool:
        """A peer is gone; returns whether it was remembered."""
        return self._peers.pop(identity, None) is not None
