"""Whole decode steps of a worker on this GPU: an engine with random weights of an 8B model, driven
by hand-made plans, the next one sent before the last one's result is read.

The limit of a step is max(weights / bandwidth, 2 x parameters x rows / product rate) + keys and
values / bandwidth, at the rates measured in the same run.
"""

import time
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu_rates import Figure
from pagefleet.params import SamplingParams
from pagefleet.wire import SAMPLED, Open, Plan, checksum, pack_ints
from pagefleet_kernels.dispatch import select
from pagefleet_worker.interface import EngineFacts, Launched
from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.rope import Rope
from pagefleet_worker.model.weights import DecoderWeights, LayerWeights
from pagefleet_worker.paging.device_slots import DeviceSlots
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.step.engine import TorchEngine
from pagefleet_worker.step.graphs import CudaCapture
from pagefleet_worker.step.inputs import DeviceInputs

CASES = ((1, 512), (8, 1024), (32, 1024), (128, 1024), (128, 4096))
"""(rows, context)"""

STEPS, WARM_UP = 30, 6
BLOCK_SIZE = 16
ROOM = STEPS + WARM_UP + BLOCK_SIZE
"""Tokens that a row has beyond its context, at most."""
DTYPE = torch.bfloat16
GOAL = 0.7

CONFIG = DecoderConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    ropes=(Rope(rope_theta=500000.0),) * 32,
    scale=128**-0.5,
    max_positions=8192,
    windows=(0,) * 32,
    tied_embeddings=False,
    dtype="bfloat16",
)
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0)


def random_weights(config: DecoderConfig, device: torch.device) -> DecoderWeights:
    """Weights of these sizes with which numbers stay small."""

    def matrix(outputs: int, inputs: int) -> Tensor:
        weight = torch.empty(outputs, inputs, device=device, dtype=DTYPE)
        return weight.normal_(std=inputs**-0.5)

    hidden, inner = config.hidden_size, config.intermediate_size
    norm = torch.ones(hidden, device=device, dtype=DTYPE)
    layers = [
        LayerWeights(
            attention_norm=norm,
            qkv=matrix(config.query_size + 2 * config.kv_size, hidden),
            output=matrix(hidden, config.query_size),
            mlp_norm=norm,
            gate_up=matrix(2 * inner, hidden),
            down=matrix(hidden, inner),
        )
        for _ in range(config.layers)
    ]
    embedding, head = (matrix(config.vocab_size, hidden) for _ in range(2))
    return DecoderWeights(embedding, layers, norm, head)


class Company:
    """Sequences that go on side by side from `context` tokens that count as computed already."""

    def __init__(self, engine: TorchEngine, rows: int, context: int) -> None:
        self.engine, self.position = engine, context
        width = -(-(context + STEPS + WARM_UP) // BLOCK_SIZE)
        self.tables = torch.randperm(engine.facts.blocks)[: rows * width].view(rows, width).tolist()
        self.checksums = [checksum(pack_ints(table)) for table in self.tables]
        self.steps = 0
        engine.reset()

    def launch(self) -> Launched:
        """Every row's next token."""
        opens, deltas, inputs = [], [], [SAMPLED] * len(self.tables)
        if self.steps == 0:
            inputs = [1] * len(self.tables)
            prompt = pack_ints([1] * (self.position + 1))
            opens = [Open(slot, GREEDY, prompt, b"", [0]) for slot in range(len(self.tables))]
            for slot, table in enumerate(self.tables):
                deltas += [each for entry in enumerate(table) for each in (slot, *entry)]
        rows = [
            number
            for slot, (table, crc) in enumerate(zip(self.tables, self.checksums, strict=True))
            for number in (slot, self.position, 1, 1, len(table), crc)
        ]
        packed = pack_ints(rows), pack_ints(inputs)
        plan = Plan(1, self.steps, *packed, opens=opens, tables=pack_ints(deltas))
        self.position, self.steps = self.position + 1, self.steps + 1
        return self.engine.launch(plan)


def step_seconds(engine: TorchEngine, rows: int, context: int) -> tuple[float, float]:
    """(seconds a step, of these the seconds in which Python orders it)."""
    company, flights = Company(engine, rows, context), deque[Launched]()
    ordering, began = 0.0, 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            flights.pop().result()
            ordering, began = 0.0, time.perf_counter()
        before = time.perf_counter()
        flights.append(company.launch())
        ordering += time.perf_counter() - before
        if len(flights) > 1:
            flights.popleft().result()
    flights.pop().result()
    return (time.perf_counter() - began) / STEPS, ordering / STEPS


def limit_of(config: DecoderConfig, rows: int, context: int, copy: float, product: float) -> float:
    """The least seconds of a decode step."""
    matrices = config.hidden_size * (
        config.layers * (2 * config.query_size + 2 * config.kv_size + 3 * config.intermediate_size)
        + config.vocab_size
    )
    kv_bytes = rows * context * 2 * config.layers * config.kv_size * DTYPE.itemsize
    weights = max(matrices * DTYPE.itemsize / copy, 2 * matrices * rows / product)
    return weights + kv_bytes / copy


def step_figures(device: torch.device, way: str, copy: float, product: float) -> Iterator[Figure]:
    """All cases of one way: "graphs on" and "graphs off", which is kernel by kernel, or
    "invariant", with invariant kernels in graphs.
    """
    kernels = select(device, invariant=way == "invariant")
    weights = random_weights(CONFIG, device)
    decoder = Decoder(CONFIG, weights, kernels, CONFIG.max_positions, lambda: None)
    block_bytes = 2 * CONFIG.layers * CONFIG.kv_size * BLOCK_SIZE * DTYPE.itemsize
    torch.cuda.empty_cache()
    available = int(torch.cuda.mem_get_info(device)[0] * 0.9) // block_bytes
    wanted = -(-max(rows * (context + ROOM) for rows, context in CASES) // BLOCK_SIZE)
    blocks = min(wanted, available)
    pool = make_pool(CONFIG, blocks + 1, BLOCK_SIZE, DTYPE, device)
    facts = EngineFacts("8B", "random", BLOCK_SIZE, blocks, 128, 8192, 8192, CONFIG.vocab_size)
    inputs = DeviceInputs(decoder, pool, DeviceSlots.of(facts, device), lambda: None)
    if way != "graphs off":
        inputs.capture(sorted({rows for rows, _ in CASES}), CudaCapture())
    engine = TorchEngine(facts, decoder, kernels, pool, inputs=inputs)
    for rows, context in CASES:
        limit = limit_of(CONFIG, rows, context, copy, product)
        case = f"B {rows}, context {context}, {way}"
        if rows * (context + ROOM) > blocks * BLOCK_SIZE:
            yield Figure("step", case, "not measured: no room", f"{limit * 1e3:.2f}")
            continue
        seconds, ordering = step_seconds(engine, rows, context)
        found = f"{seconds * 1e3:.2f} ms, {ordering * 1e3:.2f} of it Python's"
        goal = GOAL if way == "graphs on" and rows >= 8 else None
        yield Figure("step", case, found, f"{limit * 1e3:.2f}", limit / seconds, goal)
