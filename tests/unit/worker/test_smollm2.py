"""The default model, from its GGUF file, against transformers' own loading of the same file."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from pagefleet.manifest import TOKENIZER_FILE, Manifest
from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import unpack_floats
from pagefleet_worker.loading import load_engine
from tests.driver import Driver

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
]


@pytest.mark.slow
def test_greedy_tokens_and_logprobs_are_transformers(smollm2: Path) -> None:
    weights = Path(Manifest.load(smollm2).weights.paths[0])
    oracle = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32
    )
    tokenizer = Tokenizer.from_file(str(smollm2 / TOKENIZER_FILE))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    prompts.append(random.choices(range(49152), k=200))
    print(f"random prompt {prompts[-1]}")
    settings = WorkerSettings(device="cpu", dtype="float32", num_blocks=200)
    engine = load_engine(smollm2, settings, lambda: None)
    params = SamplingParams(max_tokens=16, seed=0, temperature=0, logprobs=0)
    compared = 0
    streams = Driver(engine, chunk=64, lookahead=True).run(prompts, [params] * len(prompts))
    for stream in streams:
        with torch.inference_mode():
            logits = oracle(torch.tensor([stream.prompt + stream.output])).logits[0]
        expected = logits[len(stream.prompt) - 1 : -1].log_softmax(-1)
        best, ids = expected.topk(2)
        for position, token in enumerate(stream.output):
            if best[position, 0] - best[position, 1] < 1e-4:
                break
            assert token == ids[position, 0]
            (logprob,) = unpack_floats(stream.logprobs[position].chosen)
            assert logprob == pytest.approx(best[position, 0].item(), abs=1e-4)
            compared += 1
    assert compared >= 0.9 * 16 * len(prompts)
