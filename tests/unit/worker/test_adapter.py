"""Models of transformers over paged attention: their tokens are those of `generate`, or they are
refused with a reason.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet_worker.adapter.experts import _experts
from pagefleet_worker.adapter.model import _attention
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.paging.batch import ROW_MULTIPLE
from pagefleet_worker.prepare import prepare
from pagefleet_worker.step.engine import TorchEngine
from tests.cell import Cell
from tests.driver import Driver
from tests.models import ADAPTED, VOCAB_SIZE
from tests.ties import ExpertMargins

SETTINGS = WorkerSettings(device="cpu", num_blocks=200, max_num_seqs=32, dtype="float32")
TOKENS = 8
GREEDY = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0)

Prepared = Callable[[str], Path]
Edited = Callable[[str, Callable[[dict[str, Any]], None]], Path]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More of them would only wait for each other: these models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    """Greedy tokens, up to where the best two are too close to tell; none where experts are."""
    with ExpertMargins() as experts:
        answer = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    if not experts.clear:
        return []
    best = torch.cat(answer.scores).topk(2).values
    clear = (best[:, 0] - best[:, 1] > 1e-4).long().cumprod(0).sum()
    return answer.sequences[0, len(prompt) :][:clear].tolist()


def test_greedy_tokens_in_any_company(
    engine: TorchEngine, oracle: torch.nn.Module, generator: random.Random
) -> None:
    prompts = [random_tokens(generator, 80) for _ in range(4)]
    answers = [generated(oracle, prompt) for prompt in prompts]
    for chunk, lookahead in ((1000, False), (generator.randint(1, 30), True)):
        streams = Driver(engine, chunk=chunk, lookahead=lookahead).run(prompts, [GREEDY] * 4)
        for stream, expected in zip(streams, answers, strict=True):
            assert stream.output[: len(expected)] == expected


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
        expected = generated(oracle, prompt)
        assert cell.clients[request].tokens[0][: len(expected)] == expected


def test_bits_do_not_depend_on_the_batch(engine: TorchEngine, generator: random.Random) -> None:
    params = SamplingParams(max_tokens=3, seed=generator.randrange(2**64), logprobs=3)
    prompts = [random_tokens(generator, 60) for _ in range(3)]
    alone = [Driver(engine).run([prompt], [params])[0] for prompt in prompts]
    together = Driver(engine, chunk=generator.randint(1, 30)).run(prompts, [params] * 3)
    for stream, expected in zip(together, alone, strict=True):
        assert (stream.output, stream.logprobs) == (expected.output, expected.logprobs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bart", "logits that are .* away from those of each sequence alone"),
        ("bert", "looks ahead"),
        ("bloom", "attends 0 times .* not once in each of its 3 layers"),
        ("falcon", "attends 0 times .* not once in each of its 3 layers"),
        ("gpt2-grouped", "layer 0 has 4 key/value heads of 16, not 2 of 16"),
        ("llama4", "layers of chunked_attention"),
        ("mamba", "layers of linear_attention"),
        ("phimoe", r"attend over the windows \[0, 0, 0\], but the config says \[8, 8, 8\]"),
        ("roberta", "fails on packed sequences"),
    ],
)
def test_what_would_fail_in_silence_is_refused(
    kind: str, reason: str, prepared_model: Prepared
) -> None:
    with pytest.raises(ModelError, match=f"^A .* model cannot be served: .*{reason}"):
        load_engine(prepared_model(kind), SETTINGS, lambda: None)


class Experts:
    """As transformers wraps them; each multiplies by its number."""

    def __init__(self, count: int) -> None:
        self.num_experts = count
        self.rows = torch.zeros(0)

    def forward(self, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        self.rows = torch.bincount(choices.flatten(), minlength=self.num_experts)
        return hidden * (weights * choices).sum(1, keepdim=True)

    forward.__wrapped__ = forward  # type: ignore[attr-defined]


def test_every_expert_gets_whole_multiples_of_rows(generator: random.Random) -> None:
    """And there is none that the module does not have: transformers before 5.18 fails on it."""
    for _ in range(50):
        module, k = Experts(generator.randint(2, 9)), generator.randint(1, 2)
        choices = torch.tensor(
            [generator.sample(range(module.num_experts), k) for _ in range(generator.randint(1, 9))]
        )
        hidden, weights = torch.rand(len(choices), 3), torch.rand(choices.shape)
        expected = module.forward(hidden, choices, weights)
        assert torch.equal(_experts(module, hidden, choices, weights), expected)
        assert len(module.rows) == module.num_experts
        assert not (module.rows % ROW_MULTIPLE).any()


def test_attention_that_asks_for_what_is_unknown_is_refused() -> None:
    heads = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ModelError, match="asks for novelty, unknown here"):
        _attention(torch.nn.Module(), heads, heads, heads, None, novelty=1, dropout=0.0)


@pytest.fixture
def edited(tmp_path: Path, small_model: Prepared) -> Edited:
    """A prepared copy of a model whose config.json was edited."""

    def edit(name: str, change: Callable[[dict[str, Any]], None]) -> Path:
        folder = shutil.copytree(small_model(name), tmp_path / "model")
        config = json.loads((folder / "config.json").read_bytes())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        return prepare(str(folder), tmp_path)

    return edit


def test_weights_that_are_missing(tmp_path: Path, small_model: Prepared) -> None:
    folder = shutil.copytree(small_model("starcoder2"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.c_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack the tensor 'model.layers.1.mlp.c_proj.weight'"):
        load_engine(prepare(str(folder), tmp_path), SETTINGS, lambda: None)


def test_longrope_within_its_first_range_only(edited: Edited) -> None:
    factors = {"short_factor": [1.1] * 8, "long_factor": [2.0] * 8}
    trained = {"original_max_position_embeddings": 128}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, **trained}
    folder = edited("starcoder2", lambda config: config.update(rope_parameters=rope))
    with pytest.raises(ModelError, match="set --max-model-len 128 or less"):
        load_engine(folder, SETTINGS, lambda: None)
    engine = load_engine(folder, replace(SETTINGS, max_model_len=128), lambda: None)
    assert engine.facts.max_model_len == 128


def test_code_of_a_publisher_is_not_run(edited: Edited, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["model_type"] = "novel"
        config["auto_map"] = {"AutoConfig": "novel.Config", "AutoModelForCausalLM": "novel.Model"}

    proof = tmp_path / "it_ran"
    folder = edited("starcoder2", change)
    (tmp_path / "model" / "novel.py").write_text(f"open({str(proof)!r}, 'w')")
    (folder / "novel.py").write_text(f"open({str(proof)!r}, 'w')")
    with pytest.raises(ModelError, match="transformers does not know this model"):
        load_engine(folder, SETTINGS, lambda: None)
    assert not proof.exists()


def test_weights_that_are_quantized(edited: Edited) -> None:
    folder = edited("starcoder2", lambda config: config.update(quantization_config={"bits": 4}))
    with pytest.raises(
        ModelError, match="are quantized, and transformers computes a starcoder2 model"
    ):
        load_engine(folder, SETTINGS, lambda: None)
