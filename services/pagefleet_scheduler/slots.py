"""The slots of one worker: which are free, and what the next plan has to say of them.

A plan ends slots before it opens others, and opens before it forks. So a slot that is given back
can be taken again at once, unless a fork that no plan has ordered yet copies it: then it ends after
that plan.
"""


class SlotBook:
    """Free slots, and the ends and forks that the next plan orders."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._ended: list[int] = []
        self._forks: list[tuple[int, int, int]] = []
        self._closing: dict[int, bool] = {}
        """Slots that end once the forks are ordered, and whether the worker knows of them."""

    def __repr__(self) -> str:
        return f"<SlotBook {len(self._free)} of {self._count} free, {len(self._forks)} forks>"

    @property
    def available(self) -> bool:
        """Whether one can be taken."""
        return bool(self._free)

    def take(self) -> int:
        """A free slot."""
        return self._free.pop()

    def fork(self, target: int, source: int, choice: int) -> None:
        """Let a slot that was taken, or the source itself, begin as a copy for one choice."""
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
        """Slots to end and triples to fork, one after another, for a plan that is made now."""
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
