"""The buddy allocator that the paper gives Orca for its contiguous reservations (section 6.1).

The arena is a row of regions, each the largest power of two that still fits: 15,728 slots are
8192 + 4096 + 2048 + 1024 + 256 + 64 + 32 + 16. A chunk of 2^k slots begins at a multiple of 2^k,
and its buddy is the other half of the chunk that both were split from: the address with bit k
flipped. (Knowlton, "A fast storage allocator", CACM 8(10), 1965.)
"""

from collections import defaultdict


class BuddyArena:
    """Chunks of powers of two; the smallest that fits and lies lowest is split for a request."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free: defaultdict[int, set[int]] = defaultdict(set)
        """Addresses of the free chunks of each size."""
        self._taken: dict[int, int] = {}
        """Size of the chunk at each address."""
        address = 0
        while address < slots:
            size = 1 << (slots - address).bit_length() - 1
            self._free[size].add(address)
            address += size

    def __repr__(self) -> str:
        return f"<BuddyArena {sum(self._taken.values())} of {self.slots} slots taken>"

    def allocate(self, slots: int) -> int | None:
        """The address of a chunk of at least `slots`, or None if no free chunk is large enough."""
        wanted = chunk_size(slots)
        fitting = [size for size, chunks in self._free.items() if size >= wanted and chunks]
        if not fitting:
            return None
        size = min(fitting)
        address = min(self._free[size])
        self._free[size].remove(address)
        while size > wanted:
            size //= 2
            self._free[size].add(address + size)
        self._taken[address] = size
        return address

    def free(self, address: int) -> None:
        """Give a chunk back, and join it with its buddy as long as that is free too."""
        size = self._taken.pop(address)
        while address ^ size in self._free[size]:
            self._free[size].remove(address ^ size)
            address &= ~size
            size *= 2
        self._free[size].add(address)

    def check(self) -> None:
        """Assert that free and taken chunks cover every slot once."""
        chunks = [(address, size) for size, free in self._free.items() for address in free]
        address = 0
        for start, size in sorted([*chunks, *self._taken.items()]):
            assert start == address
            assert start % size == 0
            address += size
        assert address == self.slots


def chunk_size(slots: int) -> int:
    """The next power of two."""
    return 1 << (slots - 1).bit_length()
