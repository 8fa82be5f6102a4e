"""Steps of a worker whose ranks share a model's tensors, beside one device that has them all.

    python -m benchmarks.ranks [--ranks 2] [--device cpu] [--rows 1 8 32] [--context 128]

The model is a Llama with random weights, of about the size of SmolLM2-135M unless `--hidden`,
`--layers` and `--inner` say otherwise. On a CPU the ranks share the cores that the one worker has.
Either engine is driven by the same hand-made plans, in turns; figures are medians of wall time.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copy

from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.cpu_step import Batch, fill
from pagefleet.manifest import TOKENIZER_FILE
from pagefleet.prepared import prepared_folder
from pagefleet.settings import DEFAULT_MODEL, WorkerSettings
from pagefleet_worker.ending import run_to_end
from pagefleet_worker.group import load_group
from pagefleet_worker.interface import Engine
from pagefleet_worker.loading import load_engine
from pagefleet_worker.prepare import prepare

TURNS, STEPS = 5, 15


def make_model(folder: Path, hidden: int, layers: int, inner: int) -> Path:
    """A prepared model of these sizes, with heads of 64 and the default model's vocabulary."""
    own = prepared_folder(WorkerSettings(model=DEFAULT_MODEL))
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    copy(own / TOKENIZER_FILE, folder / "model")
    return prepare(str(folder / "model"), folder)


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Of a call, after one that does not count."""
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def decoded(rows: int, context: int, engine: Engine) -> float:
    """Seconds of a step in which `rows` go on by a token each."""
    return median_seconds(Batch(engine, rows, context, STEPS + 5).run, STEPS)


def prefilled(tokens: int, engine: Engine) -> float:
    """Seconds of a step over a whole prompt."""
    return median_seconds(partial(fill, engine, tokens), 3)


def line(title: str, found: list[tuple[float, float]]) -> str:
    """Medians over the turns, in milliseconds, and their ratio in a turn."""
    alone, shared = zip(*found, strict=True)
    ratio = statistics.median(a / b for a, b in found)
    medians = (1e3 * statistics.median(each) for each in (alone, shared))
    return f"{title:>16} {next(medians):10.1f} {next(medians):10.1f} {ratio:8.2f}"


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 8, 32))
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--inner", type=int, default=1536)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(Path(made), options.hidden, options.layers, options.inner)
        blocks = max(options.rows) * (options.context // 16 + 4) + options.prompt // 16 + 1
        alone = WorkerSettings(device=options.device, dtype=options.dtype, num_blocks=blocks)
        shared = replace(alone, tensor_parallel_size=options.ranks)
        engine = load_engine(folder, alone, lambda: None)
        engine.team = None  # all threads compute every step
        group = load_group(folder, shared, lambda: None, lambda *_: None)
    print(f"load {os.getloadavg()[0]:.1f}; {group.facts.numerics}")
    print(f"{'':16} {'alone, ms':>10} {f'{options.ranks} ranks':>10} {'speed':>8}")
    work = {f"{rows} rows": partial(decoded, rows, options.context) for rows in options.rows}
    work[f"prompt of {options.prompt}"] = partial(prefilled, options.prompt)
    for title, seconds in work.items():
        pairs = [(seconds(engine), seconds(group)) for _ in range(TURNS)]
        print(line(title, pairs), flush=True)


if __name__ == "__main__":
    run_to_end(main)
