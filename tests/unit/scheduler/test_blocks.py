"""The block pool: states, reference counts, the prefix index; as a state machine at the end."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagefleet.wire import Ints, pack_ints
from pagefleet_scheduler.blocks import BlockKey, BlockPool, History, chain, root

SIZE = 4


def keys_of(pool: BlockPool, salt: bytes, tokens: list[int]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        packed = pack_ints(tokens[start : start + SIZE])
        keys.append(BlockKey(pool.digest(keys[-1].digest if keys else root(salt), packed), packed))
    return keys


def fill(pool: BlockPool, salt: bytes, tokens: list[int]) -> list[int]:
    """What the planner does for one sequence: hit, allocate, index."""
    keys = keys_of(pool, salt, tokens)
    table, history = pool.match(salt, keys)
    for block in table:
        pool.share(block)
    hits = len(table)
    table += [pool.allocate() for _ in range(-(-len(tokens) // SIZE) - hits)]
    for number in range(hits, len(keys)):
        history = pool.index(table[number], keys[number], history)
    return table


def test_a_second_sequence_hits_the_first_ones_full_blocks() -> None:
    pool = BlockPool(10, SIZE)
    first = fill(pool, b"", list(range(10)))
    second = fill(pool, b"", [*range(8), 99])
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert pool.shared(first[0])
    pool.check([first, second])


def test_another_tenant_hits_nothing() -> None:
    pool = BlockPool(10, SIZE)
    first = fill(pool, b"one", list(range(8)))
    second = fill(pool, b"two", list(range(8)))
    assert not set(first) & set(second)


def test_freed_blocks_settle_before_they_are_handed_out() -> None:
    pool = BlockPool(2, SIZE)
    table = fill(pool, b"", list(range(8)))
    pool.release(table)
    assert (pool.available, pool.settling) == (0, 2)
    with pytest.raises(IndexError):
        pool.allocate()
    pool.settle()
    assert (pool.available, pool.cached) == (2, 2)


def test_a_block_that_is_hit_before_it_settles_is_held_again() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(table := fill(pool, b"", list(range(12))))
    again = fill(pool, b"", list(range(8)))
    assert (again, pool.settling) == (table[:2], 1)
    pool.check([again])
    pool.settle()
    pool.check([again])


def test_the_tail_of_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(6, SIZE)
    old = fill(pool, b"", list(range(12)))
    new = fill(pool, b"", list(range(100, 112)))
    for table in (old, new):
        pool.release(table)
    pool.settle()
    assert [pool.allocate() for _ in range(6)] == [*reversed(old), *reversed(new)]


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3, SIZE)
    kept = fill(pool, b"", list(range(4)))
    blank = fill(pool, b"", [7])
    pool.release(kept)
    pool.release(blank)
    pool.settle()
    assert kept[0] not in {pool.allocate(), pool.allocate()}
    assert fill(pool, b"", list(range(4))) == kept


def test_without_caching_nothing_is_hit() -> None:
    pool = BlockPool(4, SIZE, caching=False)
    pool.release(fill(pool, b"", list(range(8))))
    pool.settle()
    assert pool.cached == 0
    assert pool.match(b"", keys_of(pool, b"", list(range(8))))[0] == []


def one_byte(before: bytes, tokens: Ints) -> bytes:
    """A digest so short that different histories collide all the time."""
    return chain(before, tokens)[:1]


class Paging(RuleBasedStateMachine):
    """Sequences come, fork and go; content is compared with what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24, SIZE, digest=one_byte)
        self.tables: list[tuple[list[int], bytes, list[int]]] = []
        self.written: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @rule(
        salt=st.sampled_from([b"a", b"b"]),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    )
    def begin(self, salt: bytes, tokens: list[int]) -> None:
        keys = keys_of(self.pool, salt, tokens)
        hits, history = self.pool.match(salt, keys)
        for number, block in enumerate(hits):
            assert self.written[block] == (salt, tuple(tokens[: (number + 1) * SIZE]))
        needed = -(-len(tokens) // SIZE) - len(hits) + self.pool.idle(hits)
        if needed > self.pool.available:
            return
        for block in hits:
            self.pool.share(block)
        fresh = [self.pool.allocate() for _ in range(-(-len(tokens) // SIZE) - len(hits))]
        table = hits + fresh
        assert not {block for block in fresh if self.pool.shared(block)}
        for number in range(len(hits), len(table)):
            self.written[table[number]] = (salt, tuple(tokens[: (number + 1) * SIZE]))
        for number in range(len(hits), len(keys)):
            history = self.pool.index(table[number], keys[number], history)
        self.tables.append((table, salt, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, salt, tokens = data.draw(st.sampled_from(self.tables))
        for block in table:
            self.pool.share(block)
        self.tables.append((table.copy(), salt, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table, _, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @rule()
    def settle(self) -> None:
        self.pool.settle()

    @invariant()
    def holds(self) -> None:
        self.pool.check([table for table, _, _ in self.tables])


TestPaging = Paging.TestCase
TestPaging.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_history_needs_the_very_block_before_it() -> None:
    """Equal digests and equal tokens after different beginnings are not the same history."""
    pool = BlockPool(8, 1, digest=lambda before, tokens: b"same")
    seed = random.randrange(100)
    first, second = [BlockKey(b"same", pack_ints([seed + n])) for n in range(2)]
    history: History = pool.index(pool.allocate(), first, root(b""))
    pool.index(pool.allocate(), second, history)
    assert pool.match(b"", [second])[0] == []


def test_what_follows_equal_blocks_of_different_histories_is_told_apart() -> None:
    """Where a digest knows only a block's own tokens, as if all histories collided."""
    pool = BlockPool(8, SIZE, digest=lambda before, tokens: tokens)
    first, second = [1] * SIZE, [2] * SIZE
    common = [3] * SIZE
    ones = fill(pool, b"", first + common)
    others = fill(pool, b"", second + common + [4] * SIZE)
    assert not set(ones) & set(others)
    hits, _ = pool.match(b"", keys_of(pool, b"", first + common + [4] * SIZE))
    assert hits == ones[:1]
    pool.check([ones, others])
