"""Models of transformers over paged attention: their tokens are those of `generate`, or they are
refused with a reason.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet_worker.engine import TorchEngine
from pagefleet_worker.loading import load_engine
from tests.cell import Cell
from tests.driver import Driver
from tests.models import ADAPTED, VOCAB_SIZE

SETTINGS = WorkerSettings(device="cpu", num_blocks=200, max_num_seqs=32, dtype="float32")
TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0)

Prepared = Callable[[str], Path]


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module", params=ADAPTED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(name: str, prepared_model: Prepared) -> TorchEngine:
    return load_engine(prepared_model(name), SETTINGS, lambda: None)


@pytest.fixture(scope="module")
def oracle(name: str, small_model: Prepared) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(small_model(name), attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model


def random_tokens(generator: random.Random, longest: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, longest))]


@torch.inference_mode()
def generated(oracle: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Greedy tokens, up to where the best two are too close to tell."""
    answer = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    best = torch.cat(answer.scores).topk(2).values
    clear = (best[:, 0] - best[:, 1] > 1e-4).long().cumprod(0).sum()
    return answer.sequences[0, len(prompt) :][:clear].tolist()


def assert_generated(oracle: torch.nn.Module, prompt: list[int], tokens: list[int]) -> None:
    expected = generated(oracle, prompt)
    assert tokens[: len(expected)] == expected


def test_greedy_tokens_in_any_company(
    engine: TorchEngine, oracle: torch.nn.Module, generator: random.Random
) -> None:
    prompts = [random_tokens(generator, 80) for _ in range(5)]
    for chunk, lookahead in ((1000, False), (generator.randint(1, 30), True)):
        streams = Driver(engine, chunk=chunk, lookahead=lookahead).run(prompts, [GREEDY] * 5)
        for stream in streams:
            assert_generated(oracle, stream.prompt, stream.output)


def test_greedy_tokens_with_a_shared_prefix(
    engine: TorchEngine, oracle: torch.nn.Module, generator: random.Random
) -> None:
    cell = Cell(lambda: engine)
    cell.join()
    common = [generator.randrange(VOCAB_SIZE) for _ in range(40)]
    cell.submit(common, GREEDY)
    cell.run()
    prompts = [common[:-1] + random_tokens(generator, 30) for _ in range(3)]
    requests = [cell.submit(prompt, GREEDY) for prompt in prompts]
    cell.run()
    cell.assert_idle()
    assert cell.planner.prefix_hits == 3 * 32
    for request, prompt in zip(requests, prompts, strict=True):
        assert_generated(oracle, prompt, cell.clients[request].tokens[0])
