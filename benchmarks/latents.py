"""How fast a CPU decodes over latents, beside transformers' modules.

    THP_MEM_ALLOC_ENABLE=1 GOMP_SPINCOUNT=2000 python -m benchmarks.latents

(the two variables are what a worker process sets for itself.)
A model of DeepSeek-V2-Lite's shapes, with few of its layers and random weights, computes steps of
some rows that each have a context behind them. transformers keeps latents too, but makes keys and
values of all heads of all of them in every step. What is in the caches is random: only time is
measured. Figures are medians.
"""

import argparse
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV2Config, DynamicCache, PreTrainedModel

from pagefleet.manifest import Weights
from pagefleet_kernels.dispatch import select
from pagefleet_worker.model.config import DecoderConfig, parse_config
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.weights import load_weights
from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.paging.slots import Row, Slot

CPU, BLOCK_SIZE = torch.device("cpu"), 16
LITE = {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 16384,
}
"""DeepSeek-V2-Lite's, but for the vocabulary; of latents they are the class's own."""


def random_model(layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' modules with random weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        DeepseekV2Config(**LITE, num_hidden_layers=layers), dtype=dtype
    )
    return model.eval()


def own_model(model: PreTrainedModel, folder: Path, longest: int) -> tuple[DecoderConfig, Decoder]:
    """The decoder of this project with the same weights."""
    path = folder / "model.safetensors"
    save_file(model.state_dict(), path)
    config = parse_config(model.config.to_dict())
    files = Weights("safetensors", (str(path),))
    weights = load_weights(files, config, model.dtype, CPU, lambda *_: None)
    return config, Decoder(config, weights, select(CPU), longest, lambda: None)


def median_seconds(step: Callable[[], object], repeats: int) -> float:
    """Of one step, behind two that are not counted."""
    found = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        step()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])


def own_step(
    config: DecoderConfig, decoder: Decoder, rows: int, context: int
) -> Callable[[], None]:
    """A decode step of so many rows with so much behind each."""
    blocks = -(-(context + 1) // BLOCK_SIZE)
    pool = make_pool(config, rows * blocks, BLOCK_SIZE, decoder.kv_dtype, CPU).normal_()
    slots = [Slot.bare(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
    batch = Batch.of(
        [Row(row, slot, context, array("i", [7 + row]), 1) for row, slot in enumerate(slots)],
        BLOCK_SIZE,
        CPU,
    )

    def run() -> None:
        decoder.logits(decoder.hidden(batch, pool), torch.arange(rows))

    return run


def their_step(model: PreTrainedModel, rows: int, context: int) -> Callable[[], None]:
    """The same by transformers, with a cache that is cut after every step."""
    config, cache = model.config, DynamicCache()
    for layer in range(config.num_hidden_layers):
        latent, key = (
            torch.randn(rows, 1, context, size, dtype=model.dtype)
            for size in (config.kv_lora_rank, config.qk_rope_head_dim)
        )
        cache.update(latent, key, layer)
    ids = torch.arange(7, 7 + rows).unsqueeze(1)

    def run() -> None:
        model(ids, cache=cache, use_cache=True)
        cache.crop(-1)

    return run


@torch.inference_mode()
def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=3, help="of which the first is dense")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 8))
    parser.add_argument("--contexts", type=int, nargs="*", default=(128, 1024, 4096))
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = random_model(options.layers, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        config, decoder = own_model(model, Path(folder), max(options.contexts) + 16)
    print("| rows | context | own, ms | transformers, ms |\n| --- | --- | --- | --- |")
    for rows, context in product(options.rows, options.contexts):
        steps = own_step(config, decoder, rows, context), their_step(model, rows, context)
        own, theirs = (1e3 * median_seconds(step, options.repeats) for step in steps)
        print(f"| {rows} | {context} | {own:.1f} | {theirs:.1f} |", flush=True)


if __name__ == "__main__":
    main()
