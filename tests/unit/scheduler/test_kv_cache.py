"""What a sequence finds when it begins, and what it leaves behind."""

from array import array

from pagefleet.params import SamplingParams
from pagefleet.wire import PROTOCOL, WorkerHello
from pagefleet_scheduler.kv_cache import KVCache
from pagefleet_scheduler.sequence import Request, Sequence

SIZE = 4
NOTHING = array("i")


def make_cache(blocks: int = 3, host_blocks: int = 3, size: int = SIZE) -> KVCache:
    worker = WorkerHello(
        PROTOCOL, "h", 1, 1, "m", "c", size, blocks, 8, 80, 64, 99,
        host_blocks=host_blocks, swap_micros=1.0, compute_micros=4.0,
    )  # fmt: skip
    return KVCache(worker, caching=True)


def make_sequence(tokens: list[int], prompt_logprobs: int | None = None) -> Sequence:
    params = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=prompt_logprobs)
    prompt = array("i", tokens)
    return Sequence(Request("r", 1, b"g", prompt, params, b"", 1, 0.0), [0], prompt[:])


def compute(cache: KVCache, tokens: list[int]) -> None:
    """Let a sequence come, be computed whole, and go."""
    sequence = make_sequence(tokens)
    cache.begin(sequence)
    sequence.computed = len(tokens)
    cache.index(sequence, NOTHING)
    leave(cache, sequence)
    cache.host.take_orders()


def leave(cache: KVCache, sequence: Sequence) -> None:
    cache.release(sequence)
    sequence.forget_run()
    cache.pool.settle()
    cache.check([])


def test_one_position_at_least_is_left_to_be_computed() -> None:
    cache = make_cache()
    compute(cache, [*range(8)])
    assert cache.found(make_sequence([*range(8)])) == 4
    again = make_sequence([*range(9)])
    assert (cache.found(again), cache.wanted(again), cache.begin(again)) == (8, 3, 8)
    cache.check([again])


def test_a_worker_may_have_blocks_of_another_size_than_the_one_before() -> None:
    small, large = make_cache(), make_cache(size=2 * SIZE)
    sequence = make_sequence([*range(17)])
    assert small.found(sequence) == 0
    large.begin(sequence)
    sequence.computed = 17
    large.index(sequence, NOTHING)
    assert large.found(make_sequence([*range(17)])) == large.found(sequence) == 16
    assert small.found(sequence) == 0


def test_a_prompt_whose_logprobs_are_wanted_finds_nothing() -> None:
    cache = make_cache()
    compute(cache, [*range(8)])
    asking = make_sequence([*range(9)], prompt_logprobs=0)
    assert (cache.found(asking), cache.begin(asking)) == (0, 0)


def test_who_goes_before_its_blocks_are_back_leaves_no_move_behind() -> None:
    """A block may be the target of a copy by then, which comes before moves."""
    cache = make_cache()
    compute(cache, [*range(8)])
    compute(cache, [*range(100, 112)])
    again = make_sequence([*range(9)])
    assert cache.begin(again) == 8
    leave(cache, again)
    assert cache.host.take_orders()[1] == []


def test_drafts_that_were_kept_are_part_of_a_block() -> None:
    cache = make_cache()
    sequence = make_sequence([1, 2, 3])
    cache.begin(sequence)
    sequence.computed = 4
    cache.index(sequence, array("i", [4]))
    leave(cache, sequence)
    assert cache.found(make_sequence([1, 2, 3, 4, 5])) == 4
