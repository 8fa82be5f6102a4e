"""What tenants use at all gateways, so that each gateway can enforce limits that hold for all.

With each beat a gateway says what each tenant has used there since the gateway began: sums that may
be repeated without harm, and of which a lost one is made up for by the next. Each gateway is told
what tenants have used at the others since this scheduler began. What a gateway had counted before
its first beat here is left out: the scheduler before this one has told the others.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from pagefleet.wire import MOST_USE, TenantUse

MOST_GATEWAYS = 1000
"""Gateways that are remembered: those that live, and the latest of those that may come back."""


@dataclass
class _Sum:
    requests: int = 0
    tokens: int = 0

    def add(self, new: TenantUse, old: TenantUse) -> None:
        self.requests = min(self.requests + max(0, new.requests - old.requests), MOST_USE)
        self.tokens = min(self.tokens + max(0, new.tokens - old.tokens), MOST_USE)


_NOTHING = TenantUse(0, 0, 0)


@dataclass
class Usage:
    """What tenants have used since this scheduler began."""

    _said: dict[bytes, dict[str, TenantUse]] = field(default_factory=dict)
    """By each gateway, in its last beat; who was heard last is last."""
    _total: defaultdict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    _counted: dict[bytes, defaultdict[str, _Sum]] = field(default_factory=dict)
    """The part of each of these gateways in that."""

    def note(self, gateway: bytes, used: dict[str, TenantUse]) -> None:
        """Take in what a beat says."""
        before = self._said.pop(gateway, used)  # the first beat is where counting begins
        self._said[gateway] = used
        counted = self._counted.setdefault(gateway, defaultdict(_Sum))
        for tenant, new in used.items():
            old = before.get(tenant, _NOTHING)
            self._total[tenant].add(new, old)
            counted[tenant].add(new, old)
        if len(self._said) > MOST_GATEWAYS:
            oldest = next(iter(self._said))
            del self._said[oldest], self._counted[oldest]

    def close(self, gateway: bytes) -> None:
        """A gateway is gone, and has nothing open; if it comes back, its sums go on."""
        if said := self._said.get(gateway):
            self._said[gateway] = {
                tenant: msgspec.structs.replace(use, open=0) for tenant, use in said.items()
            }

    def elsewhere(self, gateway: bytes) -> dict[str, TenantUse]:
        """What tenants have used at all other gateways, and have open there."""
        own = self._counted[gateway]
        others = [used for other, used in self._said.items() if other != gateway]
        tenants = {*self._total, *(tenant for used in others for tenant in used)}
        return {
            tenant: TenantUse(
                self._total[tenant].requests - own[tenant].requests,
                self._total[tenant].tokens - own[tenant].tokens,
                min(sum(used.get(tenant, _NOTHING).open for used in others), MOST_USE),
            )
            for tenant in tenants
        }
