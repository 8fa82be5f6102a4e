"""The pool of one worker's KV blocks: who holds which, and what the others contain.

A block is in exactly one state:

    blank     free, and its content is of no use             taken first
    cached    free, but indexed: a later prompt may hit it   taken next, least recently used first
    held      referenced by one or more block tables         never taken

A block that becomes free while a plan is being made is `settling` first: the plan may still order
copies that read it, so it is handed out again only after `settle`.

A full block is indexed under its `BlockKey` once its content is certain. The key's digest is a
chain: SHA-256 over the digest before it and the block's own tokens, as tagged fields, beginning
with the tenant's salt. So equal digests mean equal histories, on every worker. But a hit does not
rely on that: it also compares the tokens, and whether the block before it is the very one that the
entry continues. A sequence releases its blocks tail first, so that a cached block is never taken
before those that continue it (PagedAttention, Kwon et al., SOSP 2023, section 4.3).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

from pagefleet.wire import Ints


class BlockKey(NamedTuple):
    """What a full block contains, and after what."""

    digest: bytes
    tokens: Ints


def chain(before: bytes, tokens: Ints) -> bytes:
    """The digest of a full block that follows a block with the digest `before`."""
    return hashlib.sha256(b"pagefleet block\0%d\0" % len(before) + before + tokens).digest()


def root(salt: bytes) -> bytes:
    """The digest that the first blocks of a tenant's sequences follow."""
    return hashlib.sha256(b"pagefleet salt\0%d\0" % len(salt) + salt).digest()


History: TypeAlias = int | bytes
"""What a block continues: the identity of an index entry; if it is the first, its tenant's root."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What an indexed block is known to hold."""

    key: BlockKey
    identity: int
    """Unique for as long as the pool lives."""
    before: History


class BlockPool:
    """Reference counts, free blocks and the prefix index of one worker's pool."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        digest: Callable[[bytes, Ints], bytes] = chain,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.caching = caching
        self.digest = digest
        self._references = [0] * blocks
        self._blank = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._settling: list[int] = []
        self._entries: dict[int, Entry] = {}
        self._index: dict[bytes, int] = {}
        self._identities = count(1)
        self._twin: BlockPool | None = None
        self.evict: Callable[[int, Entry], None] | None = None
        """Called with a cached block that is about to be handed out, and what it holds."""

    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.held} held, {len(self._cached)} cached, {len(self._blank)} blank, "
            f"{len(self._settling)} settling of {self.blocks}>"
        )

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._blank) + len(self._cached)

    @property
    def settling(self) -> int:
        """Blocks that become available with the next `settle`."""
        return len(self._settling)

    @property
    def cached(self) -> int:
        """Blocks that are free but kept for their content."""
        return len(self._cached)

    @property
    def cached_blocks(self) -> list[int]:
        """Those blocks, in the order in which they are taken."""
        return list(self._cached)

    @property
    def held(self) -> int:
        """Blocks that some table refers to."""
        return self.blocks - self.available - self.settling

    def shared(self, block: int) -> bool:
        """Whether more than one table refers to `block`: it must be copied before a write."""
        return self._references[block] > 1

    def allocate(self) -> int:
        """Take a block for one table.

        Raises:
            IndexError: none is available; the caller should have looked.
        """
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            entry = self._forget(block)
            if self.evict is not None:
                self.evict(block, entry)
        else:
            raise IndexError("the pool has no block available")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more table that refers to `block`; a cached block is held again."""
        if self._references[block] == 0:
            if block in self._cached:
                del self._cached[block]
            else:
                self._settling.remove(block)
        self._references[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """Count one table less for each of its blocks; those at its end are taken first."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._settling.append(block)

    def settle(self) -> None:
        """Make available what became free; called between plans, when nothing refers to it."""
        for block in self._settling:
            if block in self._entries:
                self._cached[block] = None
            else:
                self._blank.append(block)
        self._settling.clear()

    def match(self, salt: bytes, keys: Iterable[BlockKey]) -> tuple[list[int], History]:
        """The blocks that hold the longest indexed prefix of a sequence of full blocks.

        Also what a block behind them continues (`index`).
        """
        return self.follow(keys, root(salt))

    def follow(self, keys: Iterable[BlockKey], before: History) -> tuple[list[int], History]:
        """The blocks that continue a history, as far as they are indexed; and their history."""
        hits: list[int] = []
        for key in keys:
            identity = self._known(key, before)
            if identity is None:
                break
            hits.append(self._index[key.digest])
            before = identity
        return hits, before

    def join(self, twin: "BlockPool") -> None:
        """Let two pools give equal content equal identities, so that blocks can move over."""
        self._twin, twin._twin = twin, self
        self._identities = twin._identities

    def holds(self, entry: Entry) -> bool:
        """Whether this very content is indexed."""
        return self._known(entry.key, entry.before) == entry.identity

    def adopt(self, block: int, entry: Entry) -> None:
        """Index a block under the entry of a block of the twin."""
        known = self._index.get(entry.key.digest)
        if known is not None:
            self._disown(known)
        self._entries[block] = entry
        self._index[entry.key.digest] = block

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are available now, and would not be once they are shared."""
        return sum(block in self._cached for block in blocks)

    def index(self, block: int, key: BlockKey, before: History) -> History:
        """Index a full block under its content, which continues `before`.

        Content that is indexed under another block stays with that block. Returns what the next
        block of the same sequence continues.
        """
        if not self.caching:
            return before
        identity = self._known(key, before)
        if identity is None:
            twin = self._twin and self._twin._known(key, before)
            identity = twin or next(self._identities)
            self.adopt(block, Entry(key, identity, before))
        return identity

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, given all tables that refer to the pool."""
        counted = [0] * self.blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        assert counted == self._references, "a reference count is not the number of tables"
        free = [*self._blank, *self._cached, *self._settling]
        assert sorted(free) == [b for b in range(self.blocks) if not counted[b]]
        assert len(self._entries) == len(self._index)
        for block, entry in self._entries.items():
            assert self._index[entry.key.digest] == block
        assert self._cached.keys() <= self._entries.keys()
        assert self._entries.keys().isdisjoint(self._blank)

    def _known(self, key: BlockKey, before: History) -> int | None:
        """The identity of a content, if it is indexed."""
        block = self._index.get(key.digest)
        if block is None:
            return None
        entry = self._entries[block]
        return entry.identity if entry.key == key and entry.before == before else None

    def _forget(self, block: int) -> Entry:
        entry = self._entries.pop(block)
        del self._index[entry.key.digest]
        return entry

    def _disown(self, block: int) -> None:
        """Another history claims a block's digest: what the block holds can be hit no more."""
        self._forget(block)
        if block in self._cached:
            del self._cached[block]
            self._blank.append(block)
