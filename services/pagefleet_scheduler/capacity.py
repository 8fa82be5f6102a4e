"""What a worker can hold. Workers of equal capacity are alike to whoever waits for one."""

from collections.abc import Collection
from typing import NamedTuple

from pagefleet.wire import Numerics, WorkerHello, numerics_of
from pagefleet_scheduler.sequence import Needs


class Capacity(NamedTuple):
    """All that decides which sequences may run at a worker, if they run there alone."""

    max_model_len: int
    blocks: int
    block_size: int
    slots: int
    caching: bool
    """Whether the blocks of equal prefixes are shared."""
    numerics: Numerics

    @classmethod
    def of(cls, worker: WorkerHello, *, caching: bool) -> "Capacity":
        """What a worker says of itself."""
        sizes = worker.max_model_len, worker.blocks, worker.block_size, worker.slots
        return cls(*sizes, caching, numerics_of(worker.numerics))

    @classmethod
    def least(cls, capacities: Collection["Capacity"]) -> "Capacity":
        """What fits this fits all of them; nothing does if their blocks differ in size."""
        if len({each.block_size for each in capacities}) != 1:
            return cls(0, 0, 1, 0, False, 0)
        lengths, blocks, sizes, slots, caching, _ = zip(*capacities, strict=True)
        return cls(min(lengths), min(blocks), sizes[0], min(slots), all(caching), 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits."""
        return min(self.max_model_len, self.blocks * self.block_size)

    def fits(self, needs: Needs) -> bool:
        """Whether a sequence, or all beams of a search, could run to the end.

        Beams share the full blocks of their prompt: forks from the start, and those that are
        computed again by the prefix cache (`Planner.computes_prefix_of`).
        """
        prompt, max_tokens, beams = needs
        whole = -(-max(prompt + max_tokens - 1, prompt) // self.block_size)
        shared = prompt // self.block_size if self.caching else 0
        return (
            prompt + max_tokens <= self.max_model_len
            and shared + beams * (whole - shared) <= self.blocks
            and beams <= self.slots
        )
