"""The KV cache of one worker: which blocks its sequences have, and which they find again.

A sequence that begins to run takes the longest known prefix of its tokens from the device's pool
(`blocks`), what continues that from the host's (`host`), and fresh blocks for the rest. What it
then computes is indexed block by block, for others and for itself after a preemption. The last
position is always computed: its logits give the next token.
"""

from array import array
from collections.abc import Iterable

from pagefleet.wire import WorkerHello
from pagefleet_scheduler.blocks import BlockKey, BlockPool, History
from pagefleet_scheduler.host import HostTier
from pagefleet_scheduler.sequence import Sequence


class KVCache:
    """A worker's pools, and what sequences have in them."""

    def __init__(self, worker: WorkerHello, *, caching: bool) -> None:
        self.pool = BlockPool(worker.blocks, worker.block_size, caching=caching)
        self.host = HostTier(worker, self.pool)
        self.pool.evict = self.host.keep

    def __repr__(self) -> str:
        return f"<KVCache {self.pool!r}, {self.host!r}>"

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold so many positions."""
        return -(-positions // self.pool.block_size)

    def found(self, sequence: Sequence) -> int:
        """How many of its positions the device's pool holds."""
        return len(self._match(self._keys(sequence), sequence)[0]) * self.pool.block_size

    def wanted(self, sequence: Sequence) -> int:
        """How many of the available blocks `begin` takes."""
        hits, _ = self._match(self._keys(sequence), sequence)
        return self.blocks_for(len(sequence.tokens)) - len(hits) + self.pool.idle(hits)

    def begin(self, sequence: Sequence) -> int:
        """Give a sequence blocks for all of its tokens; returns how many need no computing."""
        keys = self._keys(sequence)
        hits, history = self._match(keys, sequence)
        for block in hits:
            self.pool.share(block)
        from_host = self.host.hold(keys[len(hits) :], history)  # before it evicts them
        count = self.blocks_for(len(sequence.tokens)) - len(hits)
        fresh = [self.pool.allocate() for _ in range(count)]
        self.host.bring_back(from_host, fresh[: len(from_host)])
        sequence.append_blocks(hits + fresh)
        sequence.indexed = len(hits)
        sequence.history = history
        return (len(hits) + len(from_host)) * self.pool.block_size

    def share(self, fork: Sequence) -> None:
        """Count the table of a fork, which is a copy of its parent's."""
        for block in fork.table:
            self.pool.share(block)

    def index(self, sequence: Sequence, kept: "array[int]") -> None:
        """Index the blocks that a sequence has computed: of its tokens, then of drafts `kept`."""
        size = self.pool.block_size
        if sequence.computed // size <= sequence.indexed:
            return
        tokens = sequence.tokens + kept if kept else sequence.tokens
        keys = sequence.full_keys(size, sequence.computed, self.pool.digest, tokens)
        for number in range(sequence.indexed, len(keys)):
            sequence.history = self.pool.index(
                sequence.table[number], keys[number], sequence.history
            )
        sequence.indexed = len(keys)

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence."""
        self.host.cancel(sequence.table)
        self.pool.release(sequence.table)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert the invariants, given all sequences that have blocks."""
        self.pool.check(sequence.table for sequence in running)
        self.host.check()

    def _keys(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of the blocks that a prefix hit may cover; none while logprobs of the prompt are
        wanted, which have to be computed.
        """
        if not self.pool.caching or sequence.request.wants_prompt_logprobs:
            return []
        limit = len(sequence.tokens) - 1
        return sequence.full_keys(self.pool.block_size, limit, self.pool.digest, sequence.tokens)

    def _match(self, keys: list[BlockKey], sequence: Sequence) -> tuple[list[int], History]:
        return self.pool.match(sequence.request.salt, keys)
