"""How fast a CPU worker computes steps by itself, beside what the machine allows.

    THP_MEM_ALLOC_ENABLE=1 GOMP_SPINCOUNT=2000 python benchmarks/cpu_step.py [--threads 1]

(the two variables are what a worker process sets for itself.)
The engine is driven by hand-made plans: no other process, no socket. A decode step of B rows at
context c reads all weights and the rows' keys and values, and multiplies B rows with every matrix.
A part's limit is the larger of what reading and what multiplying takes, at the rates that this
machine shows in the same run for a sum over memory and for a matrix product of the model's shapes
at 256 rows; a step's is the sum of those of its layers' matrices, of attention and of the last
matrix, which wait for each other. Of experts those are read that rows take who choose by chance.
The last column is stricter: as if all of a step's reading could be done while it multiplies, across
parts and layers. Figures are medians. On one thread time is that thread's own CPU time, which busy
neighbours disturb least. The parts are timed in runs of their own, stage by stage; what those runs
cost more is not in the step's time.

With `--adapters 0 1 4` four random LoRA adapters of all matrices are loaded, and every step is
computed without, with one for all rows, and with four in turns. The limits do not count them.

With `--transformers` the layers are those of transformers, as of models that the decoder does not
cover: of parts only the logits are timed.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from pagefleet.manifest import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, Adapter, Manifest
from pagefleet.params import SamplingParams
from pagefleet.prepared import prepared_folder
from pagefleet.settings import DEFAULT_MODEL, WorkerSettings
from pagefleet.wire import SAMPLED, Open, Plan, checksum, pack_ints
from pagefleet_kernels.cpu_program import Program, Stage
from pagefleet_worker import model_loading
from pagefleet_worker.interface import Engine
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.config import ARCHITECTURES, DecoderConfig, load_config
from pagefleet_worker.model.lora import module_shapes
from pagefleet_worker.model_files import fingerprint
from pagefleet_worker.step.engine import TorchEngine

PARTS = ("linear", "experts", "attention", "norm", "rotary", "quantize", "shrink", "logits")
EXPERTS = (Stage.ROUTER, Stage.ROUTE, Stage.SORT, Stage.GATES, Stage.SUMS)
"""Stages that are one part."""
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0)


class Clock:
    """Seconds of one run, in all and by part."""

    def __init__(self) -> None:
        self.now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self.parts: dict[str, list[float]] = defaultdict(list)

    def median(self, work: Callable[[], object], repeats: int) -> float:
        """Median seconds of a call, after one that does not count."""
        work()
        seconds = []
        for _ in range(repeats):
            begin = self.now()
            work()
            seconds.append(self.now() - begin)
        return statistics.median(seconds)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is added to the last figure of `part`."""

        def run(*arguments: Any, **named: Any) -> Any:
            begin = self.now()
            try:
                return function(*arguments, **named)
            finally:
                self.parts[part][-1] += self.now() - begin

        return run


class Batch:
    """Sequences that go on side by side, in an epoch of their own; what they begin with counts as
    computed already.
    """

    def __init__(
        self, engine: Engine, rows: int, context: int, room: int, adapters: int = 0
    ) -> None:
        self.engine, self.position, self.step = engine, context, 0
        self.adapters = adapters
        width = -(-(context + room) // engine.facts.block_size)
        blocks = torch.randperm(engine.facts.blocks)[: rows * width].view(rows, width)
        self.tables = blocks.tolist()
        self.crcs = [checksum(pack_ints(table)) for table in self.tables]
        engine.reset()

    def run(self, count: int = 1) -> None:
        """One step in which every row goes on by `count` tokens, and samples one."""
        opens, deltas, inputs = [], [], [SAMPLED] * len(self.tables)
        if self.step == 0:
            words = (len(self.tables), count)  # random ones, which take different experts
            new = torch.randint(self.engine.facts.vocab_size, words).tolist()
            inputs = [token for own in new for token in own]
            for slot, (table, own) in enumerate(zip(self.tables, new, strict=True)):
                prompt = pack_ints([1] * self.position + own)
                adapter = slot % self.adapters + 1 if self.adapters else 0
                params = msgspec.structs.replace(GREEDY, adapter=adapter)
                opens.append(Open(slot, params, prompt, b"", [0]))
                deltas += [each for entry in enumerate(table) for each in (slot, *entry)]
        rows = [
            number
            for slot, (table, crc) in enumerate(zip(self.tables, self.crcs, strict=True))
            for number in (slot, self.position, count, 1, len(table), crc)
        ]
        plan = Plan(
            1,
            self.step,
            pack_ints(rows),
            pack_ints(inputs),
            opens=opens,
            tables=pack_ints(deltas),
        )
        self.engine.launch(plan).result()
        self.position, self.step = self.position + count, self.step + 1


class Limits:
    """What this machine can do in the model's terms."""

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, kv_dtype: torch.dtype, clock: Clock
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        attention = hidden * (2 * config.query_size + 2 * config.kv_size)
        experts = [each for each in config.experts if each is not None]
        dense = config.layers - len(experts)
        self.body = config.layers * attention + dense * 3 * hidden * inner
        self.experts = [(3 * hidden * each.inner_size, each) for each in experts]
        self.head = hidden * config.vocab_size
        self.itemsize = dtype.itemsize
        self.kv_bytes = 2 * config.layers * config.kv_size * kv_dtype.itemsize
        self.seen_once = 4 * config.layers * config.query_size
        memory = torch.ones(1 << 26)
        self.read = memory.nbytes / clock.median(memory.sum, 9)
        values, weight = (
            torch.ones(256, hidden, dtype=dtype),
            torch.ones(2 * inner, hidden).to(dtype),
        )
        product = clock.median(lambda: F.linear(values, weight), 21)
        self.multiplied = 2 * values.numel() * 2 * inner / product

    def seconds(self, rows: int, count: int, context: int) -> tuple[float, float]:
        """The least that a step of `rows` with `count` tokens each and one sample can take: part
        after part, and all at once.
        """
        seen, tokens = context + (count + 1) / 2, rows * count
        read_of_experts = multiplied_by_experts = 0.0
        for size, each in self.experts:
            untouched = (1 - each.routing.taken / each.count) ** tokens
            read_of_experts += size * each.count * (1 - untouched)
            multiplied_by_experts += size * each.routing.taken
        parts = [
            (
                (self.body + read_of_experts) * self.itemsize,
                2 * tokens * (self.body + multiplied_by_experts),
            ),
            (rows * (context + count) * self.kv_bytes, rows * count * seen * self.seen_once),
            (self.head * self.itemsize, 2 * rows * self.head),
        ]
        read = [size / self.read for size, _ in parts]
        multiplied = [operations / self.multiplied for _, operations in parts]
        return sum(map(max, read, multiplied)), max(sum(read), sum(multiplied))


@contextlib.contextmanager
def apart(engine: TorchEngine, clock: Clock) -> Iterator[None]:
    """Has the parts of steps timed, the stages of layers one by one."""
    decoder, run = engine.decoder, Program.run

    def run_apart(self: Program, first: int, last: int) -> None:
        for stage in range(first, last):
            part = "experts" if self[stage] in EXPERTS else self[stage].name.lower()
            clock.timed(part, run)(self, stage, stage + 1)

    logits = clock.timed("logits", decoder.logits)
    with patch.object(Program, "run", run_apart), patch.object(decoder, "logits", logits):
        yield


def measure(
    engine: TorchEngine, clock: Clock, repeats: int, run: Callable[[], None]
) -> list[float]:
    """Median seconds of a step, and of its `PARTS`."""
    whole = clock.median(run, repeats)
    clock.parts.clear()

    def step() -> None:
        for part in PARTS:
            clock.parts[part].append(0.0)
        run()

    with apart(engine, clock):
        clock.median(step, 3)
    return [whole, *(statistics.median(clock.parts[part][1:]) for part in PARTS)]


def line(
    rows: int,
    count: int,
    context: int,
    adapters: int,
    found: list[float],
    limits: tuple[float, float],
) -> str:
    """One row of the table, in tokens a second and milliseconds."""
    cells = [f"{1e3 * each:10.2f}" for each in (*found, found[0] - sum(found[1:]), limits[0])]
    shares = "".join(f" {limit / found[0]:7.0%}" for limit in limits)
    shape = f"{rows:4} {count:6} {context:7} {adapters:8}"
    return f"{shape} {rows * count / found[0]:8.0f} {''.join(cells)} {shares}"


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 8, 32, 64))
    parser.add_argument("--contexts", type=int, nargs="*", default=(128, 512, 1024))
    parser.add_argument("--chunks", type=int, nargs="*", default=(128, 512), help="prefills")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--adapters", type=int, nargs="*", default=(0,), help="LoRA adapters")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--transformers", action="store_true", help="compute the layers so")
    options = parser.parse_args()
    longest = max(options.contexts, default=0) + options.repeats + 16
    settings = WorkerSettings(
        model=options.model,
        device="cpu",
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        threads=options.threads,
        num_blocks=max(options.rows, default=1) * -(-longest // 16) + 64,
    )
    begin = time.perf_counter()
    folder = prepared_folder(settings)
    config = load_config(folder)
    with tempfile.TemporaryDirectory() as scratch:
        if most := max(options.adapters):
            folder = adapted(folder, Path(scratch, "model"), most, options.rank)
        covered = () if options.transformers else ARCHITECTURES
        with patch.object(model_loading, "ARCHITECTURES", covered):
            engine = load_engine(folder, settings, lambda: None)
    engine.team = None  # all threads compute every step
    print(f"loaded in {time.perf_counter() - begin:.1f} s; load {os.getloadavg()[0]:.1f}")
    clock = Clock()
    limits = Limits(config, engine.decoder.dtype, engine.pool.dtype, clock)
    print(
        f"{engine.facts.numerics}, {options.threads} threads: a sum reads {limits.read / 1e9:.1f} "
        f"GB/s, a product does {limits.multiplied / 1e9:.0f} GFLOP/s"
    )
    columns = ("step ms", *PARTS, "others", "limit")
    print(
        "rows tokens context adapters tokens/s"
        + "".join(f"{name:>10}" for name in columns)
        + "   of it at once"
    )
    for context, rows, adapters in product(options.contexts, options.rows, options.adapters):
        batch = Batch(engine, rows, context, options.repeats + 5, adapters)
        found = measure(engine, clock, options.repeats, batch.run)
        shape = (rows, 1, context)
        print(line(*shape, adapters, found, limits.seconds(*shape)), flush=True)
    for count, adapters in product(options.chunks, options.adapters):
        found = measure(engine, clock, 5, partial(fill, engine, count, adapters))
        print(line(1, count, 0, adapters, found, limits.seconds(1, count, 0)), flush=True)


def fill(engine: Engine, tokens: int, adapters: int) -> None:
    """One step over a whole prompt."""
    Batch(engine, 1, 0, tokens, adapters).run(tokens)


def adapted(model: Path, folder: Path, count: int, rank: int) -> Path:
    """A prepared model in a new folder, with random adapters of every matrix beside it."""
    shutil.copytree(model, folder)
    config, tensors = load_config(model), {}
    for layer in range(config.layers):
        for part, (outputs, inputs) in module_shapes(config).items():
            name = f"base_model.model.model.layers.{layer}.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank) / 100
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(settings))
    save_file(tensors, folder / ADAPTER_WEIGHTS_FILE)
    adapters = tuple(Adapter(f"adapter-{number}", str(folder)) for number in range(count))
    manifest = msgspec.structs.replace(Manifest.load(model), adapters=adapters)
    made = fingerprint(folder, manifest.weights, adapters)
    msgspec.structs.replace(manifest, fingerprint=made).save(folder)
    return folder


if __name__ == "__main__":
    main()
