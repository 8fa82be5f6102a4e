"""How a launch of paged attention divides its work, by the shapes and the chip alone.

Nothing here looks at a tensor's content: the host never waits for the device, and a captured CUDA
graph holds for every content. The tiles are the largest that the compiler fits into the registers
without spills and into shared memory (benchmarks/triton_resources.py shows both).
"""

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

_PROGRAMS_PER_PROCESSOR = 8
"""That fill a chip with the smallest query tiles, of which a processor runs a few at once."""

_LARGE_PROGRAMS_PER_PROCESSOR = 2
"""With the largest ones. More splits would cost more than they gain: partial sums of 128 rows that
go to memory and back take as long as the work on 256 keys."""

_SMALLEST_SPLIT = 256
_MOST_SPLITS = 64
_INVARIANT_SPLIT = 1024


@dataclass(frozen=True)
class Chip:
    """What the tiling asks of a device.

    processors: streaming multiprocessors or compute units.
    warpgroup_matrices: whether matrix products read both operands from shared memory (wgmma,
        tcgen05), which leaves the registers to a larger tile.
    stages: the deepest software pipeline that pays.
    converts_fp8: whether e4m3 is converted in hardware.
    lanes: threads of a warp.
    """

    processors: int
    warpgroup_matrices: bool
    stages: int
    converts_fp8: bool = False
    lanes: int = 32


@dataclass(frozen=True)
class Tiling:
    """How a launch divides its work.

    queries: rows of a query tile (tokens x query heads of one key/value head), a power of two.
    keys: positions of a key tile, a power of two.
    split: the least number of positions between two split borders, a multiple of `keys`.
    splits: programs that share a query tile, each with a split of its own; 1: one walks over all.
    warps: warps of a program.
    stages: depth of the software pipeline of loads.
    """

    queries: int
    keys: int
    split: int
    splits: int
    warps: int
    stages: int


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip behind `device`; a small one for the CPU of the interpreter."""
    if device.type != "cuda":
        return Chip(processors=2, warpgroup_matrices=True, stages=5)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        count = properties.multi_processor_count
        return Chip(count, warpgroup_matrices=False, stages=2, lanes=64)
    capability = (properties.major, properties.minor)
    return Chip(
        properties.multi_processor_count,
        warpgroup_matrices=9 <= properties.major < 12,  # the chips of workstations have none
        stages=5,
        converts_fp8=capability >= (8, 9),
    )


def matrix_side(number: int) -> int:
    """The side of a matrix tile that holds `number` lines: a power of two of at least 16."""
    return max(16, 1 << (number - 1).bit_length())


def most_heads(heads: int, queries: int) -> int:
    """How many of the heads of a token, which all read latents, a tile of so many queries takes:
    the most of which all tiles have as many.
    """
    return max(number for number in range(1, queries + 1) if heads % number == 0)


def choose_tiling(
    query: Tensor,
    key_cache: Tensor,
    tables: Tensor,
    chip: Chip,
    *,
    invariant: bool = False,
    value_size: int | None = None,
) -> Tiling:
    """The tiling for a launch of `triton_attention.attention` with arguments of these shapes.

    As many tokens as rows are taken for a decode step: the smallest query tile then does the least
    work for the keys it reads. It serves float32 always, whose products no matrix unit computes: a
    larger one spills. A batch with few query tiles is split over the context until the chip is
    full. An invariant tiling differs between the shapes of one model in `splits` only, on which no
    bit depends: it is one, or enough for every split of a fixed size.

    Values of `value_size`, if that is less than the size of keys, are latents, which are long: what
    is large is the tile's sums, so a tile takes few tokens, and as many heads as it has room for.
    """
    heads, head_size = query.shape[1:]
    kv_heads, block_size = key_cache.shape[1:3]
    rows, width = tables.shape[0], tables.shape[1] * block_size
    group = heads // kv_heads
    small = matrix_side(head_size) * key_cache.element_size() <= 256
    exact = query.dtype is torch.float32
    wide = small and chip.warpgroup_matrices and not exact
    roomy = small and key_cache.itemsize > 1  # to decode numbers of 8 bits takes registers
    full = _LARGE_PROGRAMS_PER_PROCESSOR * chip.processors
    if invariant:
        queries, keys, warps, stages = 64 if small else 32, 64 if wide else 32, 8, 3
    elif exact or query.shape[0] <= rows:
        queries, keys, warps, stages = 16, 64 if roomy else 32, 4 if small else 8, 5
        full = _PROGRAMS_PER_PROCESSOR * chip.processors
    elif wide:
        queries, keys, warps, stages = 128, 64, 8, 3
    elif roomy and matrix_side(head_size) <= 64:
        queries, keys, warps, stages = 128, 32, 8, 3
    else:
        queries, keys, warps, stages = 64, 32, 4 if roomy else 8, 3
    if value_size not in (None, head_size):
        queries, keys, warps, stages = 32, 32, 8, 2
        if exact or chip.stages < 3:  # which AMD's chips have
            queries, keys, warps = 16, 16, 4
        elif invariant or (query.shape[0] <= rows and heads <= 16):
            queries = 16
        group = most_heads(heads, queries)
        kv_heads = heads // group
    queries = max(queries, matrix_side(group))
    programs = kv_heads * (query.shape[0] // (queries // group) + rows)
    wanted = triton.cdiv(full, programs)
    if invariant:
        split = _INVARIANT_SPLIT
        splits = triton.cdiv(width, split) if wanted > 1 else 1
    else:
        splits = min(wanted, triton.cdiv(width, _SMALLEST_SPLIT), _MOST_SPLITS)
        split = _SMALLEST_SPLIT if splits > 1 else triton.cdiv(width, keys) * keys
    return Tiling(queries, keys, split, splits, warps, min(stages, chip.stages))
