"""The gateways of the cell: which of them hold a lease, and what they have missed.

A beat lists the requests that a gateway has open, and how far it has received each choice. For a
request that is not listed, nobody waits any more. Tokens that had been sent before the last beat
and have not arrived by this one were lost, and are sent again. What is listed and not known here,
the gateway has to submit again.
"""

from pagefleet.wire import PROTOCOL, GatewayBeat, Moved, Welcome
from pagefleet_scheduler.admission import Admission
from pagefleet_scheduler.outbox import Outbox
from pagefleet_scheduler.placement import Placement
from pagefleet_scheduler.requests import Requests
from pagefleet_scheduler.sequence import Sequence
from pagefleet_scheduler.usage import Usage

LEASE = 2.0
"""Seconds without a word after which a gateway's requests are dropped."""


class Gateways:
    """The gateways that hold a lease, by their identities."""

    def __init__(
        self,
        epoch: int,
        placement: Placement,
        requests: Requests,
        admission: Admission,
        outbox: Outbox,
    ) -> None:
        self.usage = Usage()
        self._epoch = epoch
        self._placement = placement
        self._requests = requests
        self._admission = admission
        self._outbox = outbox
        self._heard: dict[bytes, float] = {}

    def __repr__(self) -> str:
        return f"<Gateways {len(self)}>"

    def __len__(self) -> int:
        return len(self._heard)

    def __contains__(self, peer: object) -> bool:
        return peer in self._heard

    def hear(self, peer: bytes, now: float) -> None:
        """Give a gateway a lease, or renew it."""
        self._heard[peer] = now

    def hello(self, peer: bytes, now: float) -> None:
        """A gateway wants to be served."""
        self.hear(peer, now)
        self._outbox.send(peer, Welcome(self._epoch, PROTOCOL, self._placement.longest))

    def beat(self, peer: bytes, beat: GatewayBeat, now: float) -> list[str]:
        """Compare what a gateway has with what it was sent; returns what it must submit again."""
        listed = {line.request for line in beat.open}
        for left in self._requests.of(peer):
            if left.id not in listed:
                self._admission.leave(left, now)
        unknown = []
        for line in beat.open:
            request = self._requests.get(line.request)
            if request is None or request.attempt != line.attempt:
                if self._admission.has_moved(line.request):
                    self._outbox.send(peer, Moved(line.request))
                else:
                    unknown.append(line.request)
                continue
            for choice, position in line.positions.items():
                if sequence := request.sequences.get(choice) or request.finished.get(choice):
                    self._repeat_outputs(sequence, choice, position)
        self.usage.note(peer, beat.used)
        return unknown

    def _repeat_outputs(self, sequence: Sequence, choice: int, position: int) -> None:
        """Send again what had been sent before the gateway's last beat, and has not arrived."""
        missing = position < sequence.sent_before or sequence.finish is not None
        if sequence.base <= position <= sequence.sent_before and missing:
            self._outbox.output(sequence, choice, position)
        sequence.sent_before = sequence.sent

    def lose(self, peer: bytes, now: float) -> None:
        """A peer is gone; if it is a gateway, its requests are left."""
        if self._heard.pop(peer, None) is not None:
            self.usage.close(peer)
            for request in self._requests.of(peer):
                self._admission.leave(request, now)

    def watch(self, now: float) -> None:
        """End the leases of those that have been silent for too long."""
        for peer, heard in list(self._heard.items()):
            if now - heard > LEASE:
                self.lose(peer, now)

    def excuse(self, seconds: float) -> None:
        """Discount a time in which the scheduler was stopped and could hear nobody."""
        for peer in self._heard:
            self._heard[peer] += seconds
