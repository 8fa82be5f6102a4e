"""How fast the kernels are, beside the plain reference and the machine's own limits.

    python benchmarks/kernels.py [--threads N] [--quick] [--experts]

Decode attention is bound by memory: its figure is the bytes of keys and values that it reads a
second, beside what a plain sum reads. Prefill attention is bound by arithmetic: its figure is the
floating-point operations of the two matrix products over visible keys, beside a plain float32
product. The shape is SmolLM2-135M's: 9 query heads, 3 key/value heads, head size 64, blocks of 16.
Every figure is a median; a pool has layers until it is larger than the caches. `--experts` measures
those of gpt-oss-20b alone, a layer of 32 of which a row takes 4, with weights of all kinds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_kernels import reference
from pagefleet_kernels.dispatch import Kernels, select
from pagefleet_kernels.experts import Experts, Routing
from pagefleet_kernels.layers import Activation
from pagefleet_kernels.quantized import GROUP, Matrix, Quantized

QUERY_HEADS, HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
HIDDEN, INTERMEDIATE = 576, 1536
SCALE = HEAD_SIZE**-0.5
POOL_BYTES = 96 << 20
DTYPES = (torch.float32, torch.bfloat16)


def median_seconds(work: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Median wall time of a call in `repeats` runs of `calls`, after one that does not count."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        seconds.append((time.perf_counter() - begin) / calls)
    return statistics.median(seconds)


class Step:
    """Random rows over a pool whose blocks lie in random order."""

    def __init__(self, rows: int, context: int, tokens: int, dtype: torch.dtype) -> None:
        width = -(-context // BLOCK_SIZE)
        blocks = rows * width
        layer_bytes = 2 * blocks * HEADS * BLOCK_SIZE * HEAD_SIZE * dtype.itemsize
        layers = min(max(POOL_BYTES // layer_bytes, 1), 30)
        shape = (layers, blocks, 2, HEADS, BLOCK_SIZE, HEAD_SIZE)
        self.pool = torch.randn(shape).to(dtype).transpose(1, 2)
        self.query = torch.randn(rows * tokens, QUERY_HEADS, HEAD_SIZE).to(dtype)
        self.tables = torch.randperm(blocks).to(torch.int32).view(rows, width)
        self.starts = torch.full((rows,), context - tokens, dtype=torch.int32)
        self.offsets = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32)
        self.bytes_read = rows * context * 2 * HEADS * HEAD_SIZE * dtype.itemsize
        seen = tokens * (context - tokens) + tokens * (tokens + 1) // 2
        self.operations = 4 * QUERY_HEADS * HEAD_SIZE * rows * seen

    def seconds(self, attention: Callable[..., Tensor], repeats: int) -> float:
        """Of one layer."""

        def all_layers() -> None:
            for keys, values in layers:
                attention(
                    self.query, keys, values, self.tables, self.starts, self.offsets, scale=SCALE
                )

        layers = [(layer[0], layer[1]) for layer in self.pool]
        return median_seconds(all_layers, repeats) / len(layers)


def machine_limits(repeats: int) -> tuple[float, float]:
    """Bytes read a second by a sum, and float32 operations a second by a matrix product."""
    memory, matrix = torch.ones(POOL_BYTES // 4), torch.randn(1024, 1024)
    read = memory.nbytes / median_seconds(memory.sum, repeats)
    return read, 2 * 1024**3 / median_seconds(lambda: matrix @ matrix, repeats)


def show_decode(kernels: Kernels, read: float, repeats: int) -> None:
    """One line for each dtype, number of rows and context."""
    print("decode       rows  context      us   GB/s  of a sum's  reference us")
    for dtype in DTYPES:
        for rows in (1, 8, 32, 64):
            for context in (128, 512, 1024):
                step = Step(rows, context, 1, dtype)
                fast = step.seconds(kernels.attention, repeats)
                plain = step.seconds(reference.attention, 1)
                rate = step.bytes_read / fast
                print(
                    f"{str(dtype)[6:]:12} {rows:4}  {context:7}  {fast * 1e6:6.0f} "
                    f"{rate / 1e9:6.1f}  {rate / read:9.0%} {plain * 1e6:13.0f}"
                )


def show_prefill(kernels: Kernels, multiplied: float, repeats: int) -> None:
    """One line for each dtype and chunk."""
    print("prefill    tokens  context      us  GFLOP/s  of a product's  reference us")
    for dtype in DTYPES:
        for tokens, context in ((128, 128), (512, 512), (512, 2048)):
            step = Step(1, context, tokens, dtype)
            fast = step.seconds(kernels.attention, repeats)
            plain = step.seconds(reference.attention, 1)
            rate = step.operations / fast
            print(
                f"{str(dtype)[6:]:10} {tokens:6}  {context:7}  {fast * 1e6:6.0f} "
                f"{rate / 1e9:8.0f}  {rate / multiplied:13.0%} {plain * 1e6:13.0f}"
            )


def show_layers(kernels: Kernels, repeats: int) -> None:
    """The other kernels of a step, in microseconds, and the reference after the slash."""
    print("us a call     rows      add_rms_norm          gate_mul   rotary_write_kv")
    cos_sin = torch.randn(256, HEAD_SIZE)
    for dtype in DTYPES:
        for rows in (1, 8, 64, 256):
            step = Step(rows, BLOCK_SIZE, 1, dtype)
            hidden, weight = torch.randn(rows, HIDDEN).to(dtype), torch.rand(HIDDEN).to(dtype)
            gate_up = torch.randn(rows, 2 * INTERMEDIATE).to(dtype)
            heads = torch.randn(rows, QUERY_HEADS + 2 * HEADS, HEAD_SIZE).to(dtype)
            split = torch.split(heads, [QUERY_HEADS, HEADS, HEADS], dim=1)
            index = torch.arange(rows)
            cells = []
            for name, arguments in (
                ("add_rms_norm", (hidden, hidden, weight, 1e-5)),
                ("gate_mul", (gate_up,)),
                ("rotary_write_kv", (*split, cos_sin, index, *step.pool[0], index * BLOCK_SIZE)),
            ):
                fast, plain = (
                    median_seconds(partial(getattr(twin, name), *arguments), repeats, 50)
                    for twin in (kernels, reference)
                )
                cells.append(f"{fast * 1e6:8.1f} / {plain * 1e6:6.1f}")
            print(f"{str(dtype)[6:]:12} {rows:5} " + " ".join(f"{cell:>17}" for cell in cells))


def random_experts(kind: str) -> Experts:
    """Those of a layer of gpt-oss-20b, with matrices of some kind."""
    experts, size = 32, 2880

    def matrix(outputs: int) -> Matrix:
        shape = experts * outputs, size
        if kind == "plain":
            return torch.empty(shape, dtype=torch.bfloat16).normal_(std=size**-0.5)
        scales = (torch.rand(shape[0], size // GROUP) / size**0.5).half()
        if kind == "int8":
            return Quantized(torch.randint(256, shape, dtype=torch.uint8), scales / 64)
        numbers = torch.randint(16, shape, dtype=torch.uint8)
        if kind == "float4":
            return Quantized(numbers, scales / 4, floats=True)
        return Quantized(numbers, scales / 4, -2 * scales)

    return Experts(
        router=torch.randn(experts, size).bfloat16() / size**0.5,
        gate_up=matrix(2 * size),
        down=matrix(size),
        routing=Routing(4, renormalized=True),
        router_bias=torch.randn(experts).bfloat16(),
        gate_up_bias=torch.randn(experts * 2 * size).bfloat16(),
        down_bias=torch.randn(experts * size).bfloat16(),
        activation=Activation.CLAMPED,
    )


def show_experts(kernels: Kernels, repeats: int) -> None:
    """Milliseconds of a call for each number of rows; kinds take turns."""
    kinds = ("plain", "int8", "int4", "float4")
    layers = [kernels.experts(random_experts(kind)) for kind in kinds]
    print("experts, ms     rows " + "".join(f"{kind:>8}" for kind in kinds))
    for rows in (1, 4, 16, 64, 256):
        values = torch.randn(rows, 2880).bfloat16()
        found: list[list[float]] = [[] for _ in kinds]
        for _ in range(repeats):
            for seconds, layer in zip(found, layers, strict=True):
                seconds.append(median_seconds(partial(layer, values), 1))
        print(f"{rows:20} " + "".join(f"{statistics.median(each) * 1e3:8.1f}" for each in found))


def show_alternation(kernels: Kernels, repeats: int) -> None:
    """Whether torch's threads and the kernels' get in each other's way."""
    step = Step(8, 256, 1, torch.bfloat16)
    hidden = torch.randn(8, HIDDEN).bfloat16()
    weight = torch.randn(2 * INTERMEDIATE, HIDDEN).bfloat16()

    def multiply() -> Tensor:
        return F.linear(hidden, weight)

    def attend() -> Tensor:
        caches = step.pool[0]
        return kernels.attention(
            step.query, caches[0], caches[1], step.tables, step.starts, step.offsets, scale=SCALE
        )

    def in_turns() -> None:
        multiply()
        attend()

    figures = [median_seconds(work, repeats, 100) * 1e6 for work in (multiply, attend, in_turns)]
    print("F.linear {:.1f} us, attention {:.1f} us, in turns {:.1f} us".format(*figures))


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, help="of torch and the kernels")
    parser.add_argument("--quick", action="store_true", help="medians of 3 instead of 15")
    parser.add_argument("--experts", action="store_true", help="those of gpt-oss-20b alone")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    repeats = 3 if options.quick else 15
    kernels = select(torch.device("cpu"))
    if options.experts:
        show_experts(kernels, repeats)
        return
    begin = time.perf_counter()
    for dtype in DTYPES:
        kernels.warm_up(dtype, dtype, QUERY_HEADS, HEADS, HEAD_SIZE)
    print(f"warm-up {time.perf_counter() - begin:.2f} s, {torch.get_num_threads()} threads")
    read, multiplied = machine_limits(repeats)
    print(f"a sum reads {read / 1e9:.1f} GB/s, a product does {multiplied / 1e9:.0f} GFLOP/s")
    show_decode(kernels, read, repeats)
    show_prefill(kernels, multiplied, repeats)
    show_layers(kernels, repeats)
    show_alternation(kernels, repeats)


if __name__ == "__main__":
    main()
