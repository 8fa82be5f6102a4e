import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.driver import Driver
from tests.models import VARIANTS, VOCAB_SIZE
from transformers import AutoModelForCausalLM

from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet_worker.loading import load_engine

SETTINGS = WorkerSettings(num_blocks=200, max_num_seqs=32, threads=1, device="cpu")


def random_prompts(count: int, longest: int, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    lengths = [generator.randint(1, longest) for _ in range(count)]
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def check_greedy(
    model: torch.nn.Module, prompt: list[int], output: list[int], margin: float = 1e-4
) -> int:
    """Assert that each token is the model's own choice, until two are too close; how many were."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best, ids = logits.topk(2)
    for position, token in enumerate(output):
        if best[position, 0] - best[position, 1] < margin:
            return position
        assert token == ids[position, 0]
    return len(output)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_are_transformers(
    name: str,
    small_model: Callable[[str], Path],
    prepared_model: Callable[[str], Path],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model(name), dtype=torch.float32)
    engine = load_engine(prepared_model(name), SETTINGS, lambda: None)
    prompts = random_prompts(6, 100)
    for chunk in (16, 64, 1000):
        for lookahead in (False, True):
            streams = Driver(engine, chunk=chunk, lookahead=lookahead).run(
                prompts, SamplingParams(max_tokens=12, seed=0, temperature=0)
            )
            compared = sum(check_greedy(model, s.prompt, s.output) for s in streams)
            assert compared >= 0.9 * 12 * len(prompts)
