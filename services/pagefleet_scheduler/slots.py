"""The slots of one worker: which are free, and what the next plan has to say about them.

A plan ends slots before it opens others, and opens before it forks. So a slot that is given back
can be taken again at once, unless a fork that is still to be ordered copies from it: then it ends
with the plan after that.
"""


class SlotBook:
    """Free slots, and the ends and forks that the next plan orders."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._ended: list[int] = []
        self._forks: list[tuple[int, int, int]] = []
        self._closing: dict[int, bool] = {}
        """Slots that end once the forks are ordered, each with whether the worker knows of it."""

    def __repr__(self) -> str:
        return f"<SlotBook {len(self._free)} of {self._count} free, {len(self._forks)} forks>"

    @property
    def available(self) -> bool:
        """Whether there is a free one."""
        return bool(self._free)

    def take(self) -> int:
        """Take a free slot."""
        return self._free.pop()

    def fork(self, target: int, source: int, choice: int) -> None:
        """Let a slot that was taken begin as a copy of `source`, for one choice; or that itself."""
        self._forks.append((target, source, choice))

    def give_back(self, slot: int, opened: bool) -> None:
        """End a slot; `opened`: the worker was told of it, or of what it was forked from."""
        unknown = not opened or any(fork[0] == slot != fork[1] for fork in self._forks)
        self._forks = [fork for fork in self._forks if fork[0] != slot]
        self._closing[slot] = not unknown
        sources = {source for _, source, _ in self._forks}
        for each in [each for each in self._closing if each not in sources]:
            self._free.append(each)
            if self._closing.pop(each):
                self._ended.append(each)

    def take_orders(self) -> tuple[list[int], list[int]]:
        """Slots to end, and forks as (target, source, choice) in a row, for a plan made now."""
        orders = self._ended, [number for fork in self._forks for number in fork]
        self._forks.clear()
        self._ended = [slot for slot, known in self._closing.items() if known]
        self._free.extend(self._closing)
        self._closing.clear()
        return orders

    def check(self, taken: list[int]) -> None:
        """Assert the invariants, given the slots of all running sequences."""
        known = [*taken, *self._free, *self._closing]
        assert sorted(known) == list(range(self._count)), "a slot is lost, or given twice"
