"""So much a minute: a token bucket (Turner, "New directions in communications", 1986) with debt.

What is not used is kept, up to a minute's worth. Whoever has anything left may take more than that,
because what a request will generate is not known before; the debt is waited off.
"""


class Allowance:
    """`per_minute` of something, or without limit. Times are of any monotonic clock, in seconds."""

    def __init__(self, per_minute: int | None) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute or 0)
        self._as_of: float | None = None

    def __repr__(self) -> str:
        return f"<Allowance {self._left:g} of {self._per_minute} left>"

    def change(self, per_minute: int | None) -> None:
        """Another rate from now on; what was taken stays taken."""
        if per_minute != self._per_minute:
            self._left += (per_minute or 0) - (self._per_minute or 0)
            self._per_minute = per_minute

    def wait(self, now: float) -> float:
        """Seconds until something may be taken; 0 where something may be taken now."""
        if self._per_minute is None:
            return 0.0
        self._refill(self._per_minute, now)
        missing = 1.0 - self._left
        return max(0.0, missing * 60.0 / self._per_minute)

    def take(self, count: int, now: float) -> None:
        """Use so many."""
        if self._per_minute is not None:
            self._refill(self._per_minute, now)
            self._left -= count

    def _refill(self, per_minute: int, now: float) -> None:
        if self._as_of is not None:
            grown = self._left + (now - self._as_of) * per_minute / 60.0
            self._left = min(grown, float(per_minute))
        self._as_of = now
