"""How far quantized weights, keys and values move a model's predictions, beside float32.

    python benchmarks/quantization.py [--model M] [--text README.md] [--tokens 512]

A text is read once by each variant, in steps of a worker's size. At every position the distribution
over the vocabulary is compared with that of the same weights in float32: the Kullback-Leibler
divergence in nats, how much the logprob of the token that follows differs, and whether the most
likely token is the same. Perplexity is that of the text.
"""

import argparse
from array import array
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pagefleet.manifest import TOKENIZER_FILE, Manifest
from pagefleet.params import SamplingParams
from pagefleet.prepared import prepared_folder
from pagefleet.settings import DEFAULT_MODEL, WorkerSettings
from pagefleet_worker.loading import load_engine
from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.slots import Row, Slot


def logprobs(folder: Path, settings: WorkerSettings, tokens: list[int]) -> Tensor:
    """Of every token of the vocabulary after each of `tokens`: float32 [len(tokens), V]."""
    engine = load_engine(folder, settings, lambda: None)
    size, block_size = engine.facts.max_batched_tokens, settings.block_size
    slot = Slot(SamplingParams(max_tokens=1, seed=0), len(tokens), array("i", tokens), [0], b"")
    slot.table.extend(range(-(-len(tokens) // block_size)))
    found = []
    with torch.inference_mode():
        for start in range(0, len(tokens), size):
            row = Row(0, slot, start, slot.tokens[start : start + size], 0)
            batch = Batch.of([row], block_size, engine.pool.device)
            hidden = engine.decoder.hidden(batch, engine.pool)
            logits = engine.decoder.logits(hidden, torch.arange(len(row.tokens)))
            found.append(logits.log_softmax(-1))
    return torch.cat(found)


def drift(exact: Tensor, found: Tensor, following: Tensor) -> list[str]:
    """Mean and largest divergence, the same of the following tokens' logprobs, equal choices, and
    perplexity.
    """
    divergence = (exact.exp() * (exact - found)).sum(-1)
    chosen, expected = (each.gather(1, following)[:, 0] for each in (found, exact))
    moved = (chosen - expected).abs()
    same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
    figures = [f"{each:.4f}" for each in (divergence.mean(), divergence.max())]
    figures += [f"{each:.3f}" for each in (moved.mean(), moved.max())]
    return [*figures, f"{same:.1%}", f"{(-chosen.mean()).exp():.2f}"]


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--tokens", type=int, default=512, help="of the text's beginning")
    options = parser.parse_args()
    blocks = -(-options.tokens // 16)
    plain = WorkerSettings(
        model=options.model, device="cpu", dtype="float32", quantization="none", num_blocks=blocks
    )
    folder = prepared_folder(plain)
    own = "gguf" if Manifest.load(folder).weights.kind == "gguf" else "auto"
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    tokens = tokenizer.encode(options.text.read_text()).ids[: options.tokens + 1]
    given, following = tokens[:-1], torch.tensor(tokens[1:]).unsqueeze(1)
    exact = logprobs(folder, plain, given)
    columns = ("KL mean", "max", "logprob mean", "max", "same choice", "perplexity")
    print(f"{len(given)} positions; dtype, quantization, keys: {', '.join(columns)}")
    print("float32 none auto: ", *drift(exact, exact, following))
    ways = (("none", "auto"), ("none", "fp8"), ("int8", "auto"), (own, "auto"))
    variants = [(dtype, *way) for dtype in ("float32", "bfloat16") for way in ways]
    for dtype, quantization, kept in variants[1:]:
        settings = replace(plain, dtype=dtype, quantization=quantization, kv_cache_dtype=kept)
        found = logprobs(folder, settings, given)
        print(f"{dtype} {quantization} {kept}: ", *drift(exact, found, following), flush=True)


if __name__ == "__main__":
    main()
