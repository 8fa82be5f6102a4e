"""What tenants use at all gateways, so that each can hold their limits for all of them.

A gateway says with its beats what each tenant used there since it began. Such sums may be said
again or be lost, and change nothing or a little later. Each gateway is told what the others'
tenants used since the scheduler began: what a gateway had counted before its first beat here, the
scheduler before this one knew of.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from pagefleet.wire import MOST_USE, TenantUse


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
    """Of one scheduler's life."""

    _said: dict[bytes, dict[str, TenantUse]] = field(default_factory=dict)
    """By each gateway in its last beat."""
    _total: defaultdict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    _counted: dict[bytes, defaultdict[str, _Sum]] = field(default_factory=dict)
    """The part of each gateway that is here."""

    def note(self, gateway: bytes, used: dict[str, TenantUse]) -> None:
        """A gateway beats."""
        before = self._said.get(gateway, used)  # the first beat is where counting begins
        self._said[gateway] = used
        counted = self._counted.setdefault(gateway, defaultdict(_Sum))
        for tenant, new in used.items():
            old = before.get(tenant, _NOTHING)
            self._total[tenant].add(new, old)
            counted[tenant].add(new, old)

    def forget(self, gateway: bytes) -> None:
        """A gateway is gone; what it counted stays counted."""
        self._said.pop(gateway, None)
        self._counted.pop(gateway, None)

    def elsewhere(self, gateway: bytes) -> dict[str, TenantUse]:
        """What tenants used at all other gateways, and have open there."""
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
