"""How fast the kernels are on this GPU that a step waits for longest, beside a copy and a matrix
product.

Launches are captured in a CUDA graph, as a worker replays them, so that Python's share is left
out; every launch of a graph reads other blocks, so that no cache serves it.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet_kernels.experts import Routing
from pagefleet_kernels.layers import Activation
from pagefleet_kernels.quantized import GROUP, Kind
from pagefleet_kernels.triton_attention import attention
from pagefleet_kernels.triton_experts import PackedExperts, expert_sums
from pagefleet_kernels.triton_packed import BLOCK, PackedMatrix
from pagefleet_kernels.triton_quantized import quantized_product
from pagefleet_kernels.triton_routing import route
from pagefleet_kernels.triton_sampling import sample

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16
REPLAYS = 10
COLD_BYTES = 1 << 28
"""That the launches of a graph read at least: a few times what a GPU's caches hold."""
TOKEN_NUMBERS = 2 * KV_HEADS * HEAD_SIZE
BATCHES, CONTEXTS = (1, 16, 64, 128), (1024, 4096, 16384)
PREFILLS = ((1, 0, 8192), (4, 0, 2048), (1, 6144, 2048))
"""(rows, position of the first new token, new tokens)"""
MATRICES = ((4096, 4096), (28672, 4096), (4096, 14336))
"""(outputs, inputs) of an 8B model's output, gate and up, and down."""
PRODUCT_ROWS = (1, 16, 64, 2048)
EXPERTS = (
    (None, 128, 8, 2048, 768),
    (Kind.INT4, 128, 8, 2048, 768),
    (Kind.E2M1, 32, 4, 2880, 2880),
)
"""(numbers, experts, how many of them a row takes, hidden size, inner size), of Qwen3-30B-A3B and
of gpt-oss-20b."""
EXPERT_ROWS, EXPERT_LAYERS = (1, 16, 64, 2048), 2
SAMPLED_ROWS, VOCABULARY = 64, 128256
SAMPLINGS = (
    ("greedy", 0.0, 0, 1.0),
    ("drawn", 1.0, 0, 1.0),
    ("top-p", 1.0, 0, 0.9),
    ("top-k, top-p", 1.0, 50, 0.9),
)
"""(name, temperature, top-k, top-p)"""


@dataclass(frozen=True)
class Figure:
    """One line of the table: a rate or a time, beside its limit."""

    part: str
    case: str
    found: str
    limit: str
    share: float | None = None
    goal: float | None = None

    @property
    def line(self) -> str:
        """The figure as it stands in the table."""
        share, goal = ("" if each is None else f"{each:.0%}" for each in (self.share, self.goal))
        verdict = ""
        if self.share is not None and self.goal is not None:
            verdict = "ok" if self.share >= self.goal else "below"
        return (
            f"| {self.part} | {self.case} | {self.found} | {self.limit} "
            f"| {share} | {goal} | {verdict} |"
        )


def seconds_of(work: Callable[[int], object], calls: int, repeats: int = 7) -> float:
    """Median seconds of a call, of `calls` in one graph that each get their number."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in range(2):
            work(call % calls)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            work(call)
    found = []
    graph.replay()
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / REPLAYS / calls)
    return statistics.median(found)


def copy_rate(device: torch.device, nbytes: int = 4 << 30) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda _: target.copy_(source), 4)


def product_rate(device: torch.device, size: int = 8192) -> float:
    """Floating-point operations a second of a square bfloat16 matrix product."""
    left, right = (torch.randn(size, size, device=device, dtype=DTYPE) for _ in range(2))
    output = torch.empty_like(left)
    return 2 * size**3 / seconds_of(lambda _: torch.mm(left, right, out=output), 4)


def decode_figures(
    device: torch.device, copy: float, *, eight_bits: bool = False
) -> Iterator[Figure]:
    """Decode attention: bytes of keys and values read a second, beside the copy's."""
    token_bytes = TOKEN_NUMBERS * (1 if eight_bits else DTYPE.itemsize)
    available = torch.cuda.mem_get_info(device)[0] // 2 // (TOKEN_NUMBERS * 2 * BLOCK_SIZE)
    blocks = min(BATCHES[-1] * CONTEXTS[-1] // BLOCK_SIZE, available)
    caches = _caches(blocks, device)
    if eight_bits:
        caches = caches.to(torch.float8_e4m3fn).view(torch.uint8)
    for context in CONTEXTS:
        for rows in BATCHES:
            width = context // BLOCK_SIZE
            enough = max(16, COLD_BYTES // (rows * context * token_bytes))
            calls = min(blocks // (rows * width), enough)
            if not calls:
                continue
            tables = torch.randperm(blocks, device=device)[: calls * rows * width]
            tables = tables.to(torch.int32).view(calls, rows, width)
            query = torch.randn(rows, HEADS, HEAD_SIZE, device=device, dtype=DTYPE)
            seconds = _seconds(query, caches, tables, context - 1, 1)
            rate = rows * context * token_bytes / seconds
            goal = (0.85 if context >= 4096 else 0.6) if rows == 64 and not eight_bits else None
            case = f"B {rows}, context {context}" + (", fp8" if eight_bits else "")
            found = f"{rate / 1e9:.0f} GB/s"
            yield Figure("decode", case, found, f"{copy / 1e9:.0f}", rate / copy, goal)


def prefill_figures(device: torch.device, product: float) -> Iterator[Figure]:
    """Prefill attention: operations of its two products over visible keys, beside a product's."""
    for rows, start, count in PREFILLS:
        width = (start + count) // BLOCK_SIZE
        caches = _caches(rows * width, device)
        tables = torch.randperm(rows * width, device=device).to(torch.int32).view(1, rows, width)
        query = torch.randn(rows * count, HEADS, HEAD_SIZE, device=device, dtype=DTYPE)
        seconds = _seconds(query, caches, tables.expand(4, -1, -1), start, count)
        seen = count * start + count * (count + 1) // 2
        rate = 4 * HEADS * HEAD_SIZE * rows * seen / seconds
        case = f"{rows} x {count} tokens after {start}"
        found = f"{rate / 1e12:.0f} TFLOP/s"
        yield Figure("prefill", case, found, f"{product / 1e12:.0f}", rate / product)


def sample_figures(device: torch.device, copy: float) -> Iterator[Figure]:
    """Choosing a token for each of 64 rows, beside one look at their logits."""
    logits = torch.randn(SAMPLED_ROWS, VOCABULARY, device=device) * 5  # few of them likely
    each = torch.arange(SAMPLED_ROWS, device=device)
    for name, temperature, top_k, top_p in SAMPLINGS:
        columns = (
            logits,
            each,
            torch.full_like(each, temperature, dtype=torch.float32),
            torch.full_like(each, top_k, dtype=torch.int32),
            torch.full_like(each, top_p, dtype=torch.float64),
            torch.zeros_like(each, dtype=torch.float32),
            each,
            each.int(),
            each.int(),
        )

        def work(_: int, columns: tuple[Tensor, ...] = columns) -> Tensor:
            return sample(*columns)

        seconds = seconds_of(work, 4)
        limit = logits.nbytes / copy
        case, found = f"{SAMPLED_ROWS} x {VOCABULARY}, {name}", f"{seconds * 1e6:.0f} us"
        yield Figure("sample", case, found, f"{limit * 1e6:.0f}", limit / seconds)


def quantized_figures(device: torch.device, copy: float, product: float) -> Iterator[Figure]:
    """Products with weights of few bits: beside reading them once, or multiplying at the product's
    rate, whichever takes longer.
    """
    for kind in (Kind.INT4, Kind.INT8, Kind.E4M3):
        for outputs, inputs in MATRICES:
            matrices = [_random_matrix(kind, outputs, inputs, device)]
            while len(matrices) * matrices[0].nbytes < COLD_BYTES:
                matrices.append(_random_matrix(kind, outputs, inputs, device))
            for rows in PRODUCT_ROWS:
                values = torch.randn(rows, inputs, device=device, dtype=DTYPE)

                def work(
                    call: int, values: Tensor = values, each: list[PackedMatrix] = matrices
                ) -> Tensor:
                    return quantized_product(values, each[call])

                work(0)  # compiles
                seconds = seconds_of(work, len(matrices))
                limit = max(matrices[0].nbytes / copy, 2 * rows * outputs * inputs / product)
                case = f"{rows} x {inputs} x {outputs}, {kind.name.lower()}"
                found = f"{seconds * 1e6:.1f} us"
                yield Figure("product", case, found, f"{limit * 1e6:.1f}", limit / seconds)


def expert_figures(device: torch.device, copy: float, product: float) -> Iterator[Figure]:
    """Mixtures of experts: beside reading once those that any row takes, or multiplying at the
    product's rate.
    """
    for kind, count, chosen, size, inner in EXPERTS:
        layers = [_random_experts(kind, count, size, inner, device) for _ in range(EXPERT_LAYERS)]
        expert_bytes = (layers[0].gate_up.nbytes + layers[0].down.nbytes) / count
        for rows in EXPERT_ROWS:
            values = torch.randn(rows, size, device=device, dtype=DTYPE)
            scores = torch.randn(rows, count, device=device)
            routed = route(scores, Routing(chosen, renormalized=True))

            def work(
                call: int,
                given: tuple[Tensor, Tensor, Tensor] = (values, *routed),
                each: list[PackedExperts] = layers,
            ) -> Tensor:
                return expert_sums(*given, each[call])

            work(0)  # compiles
            seconds = seconds_of(work, len(layers))
            read = len({*routed[0].flatten().tolist()}) * expert_bytes / copy
            limit = max(read, 6 * rows * chosen * size * inner / product)
            numbers = "bfloat16" if kind is None else kind.name.lower()
            case = f"{rows} rows, {chosen} of {count} x {size} x {inner}, {numbers}"
            found = f"{seconds * 1e6:.0f} us"
            yield Figure("experts", case, found, f"{limit * 1e6:.0f}", limit / seconds)


def _random_experts(
    kind: Kind | None, count: int, size: int, inner: int, device: torch.device
) -> PackedExperts:
    def matrix(outputs: int, inputs: int) -> Tensor | PackedMatrix:
        if kind is not None:
            return _random_matrix(kind, outputs, inputs, device)
        plain = torch.empty(outputs, inputs, device=device, dtype=DTYPE)
        return plain.normal_(std=inputs**-0.5)

    matrices = matrix(count * 2 * inner, size), matrix(count * size, inner)
    return PackedExperts(*matrices, None, None, Activation.SILU, count)


def _random_matrix(kind: Kind, outputs: int, inputs: int, device: torch.device) -> PackedMatrix:
    """Of random bits; scales are small."""
    blocks = -(-inputs // BLOCK)
    numbers = torch.randint(256, (blocks, outputs, BLOCK), dtype=torch.uint8, device=device)
    if kind is Kind.E4M3:
        scales = torch.full((blocks, outputs), 1e-3, device=device)
        return PackedMatrix(kind, numbers.view(torch.int16), scales, None, inputs)
    numbers = numbers.view(torch.int16) if kind is Kind.INT8 else numbers[..., ::2].contiguous()
    factors = torch.full((blocks, outputs, BLOCK // GROUP), 1e-3, device=device).half()
    pairs = factors.view(torch.int32)
    minimums = pairs.clone() if kind is Kind.INT4 else None
    return PackedMatrix(kind, numbers, pairs, minimums, inputs)


def _caches(blocks: int, device: torch.device) -> Tensor:
    shape = (2, blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    return torch.empty(shape, device=device, dtype=DTYPE).normal_()


def _seconds(query: Tensor, caches: Tensor, tables: Tensor, start: int, count: int) -> float:
    """A launch over rows of `count` tokens from `start`; tables are [calls, R, M]."""
    calls, rows = tables.shape[:2]
    starts = torch.full((rows,), start, dtype=torch.int32, device=query.device)
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * count
    scales = torch.ones(2, KV_HEADS, device=query.device) if caches.dtype == torch.uint8 else None

    def work(call: int) -> Tensor:
        arguments = (query, caches[0], caches[1], tables[call], starts, offsets)
        return attention(*arguments, scale=HEAD_SIZE**-0.5, kv_scales=scales)

    return seconds_of(work, calls)
