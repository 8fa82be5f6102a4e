"""Embeddings are transformers' hidden states, to the bit the same in any company and any chunks."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import AutoModel

from pagefleet.manifest import Manifest
from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import unpack_floats
from pagefleet_worker.loading import load_engine
from pagefleet_worker.prepare import prepare
from pagefleet_worker.step.engine import TorchEngine
from tests.cell import Cell
from tests.driver import Driver, Stream
from tests.gpu_twin import Recorder, as_on_gpu
from tests.models import ADAPTED, EOS, VARIANTS, VOCAB_SIZE, make_model
from tests.ties import ExpertMargins

SETTINGS = WorkerSettings(num_blocks=200, max_num_seqs=32, device="cpu", dtype="float32")
WHOLE = SamplingParams(max_tokens=0, seed=0, embedding=0)
GREEDY = SamplingParams(max_tokens=6, seed=0, temperature=0)

Prepared = Callable[[str], Path]


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


def random_tokens(generator: random.Random, longest: int = 90) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, longest))]


@torch.inference_mode()
def expected(oracle: torch.nn.Module, prompt: list[int], dimensions: int = 0) -> torch.Tensor:
    state = oracle(torch.tensor([prompt])).last_hidden_state[0, -1]
    return F.normalize(state[: dimensions or None], dim=0)


def numbers(embedding: bytes | None) -> torch.Tensor:
    assert embedding is not None
    return torch.tensor(unpack_floats(embedding))


def embeddings(streams: list[Stream]) -> list[bytes | None]:
    assert not any(stream.output or stream.errors for stream in streams)
    return [stream.embedding for stream in streams]


@pytest.mark.parametrize("name", [*VARIANTS, *ADAPTED])
def test_they_are_transformers(
    name: str, small_model: Prepared, prepared_model: Prepared, generator: random.Random
) -> None:
    """With prefixes that are found again, beside streams, in chunks."""
    oracle = AutoModel.from_pretrained(small_model(name), attn_implementation="eager")
    engine = load_engine(prepared_model(name), SETTINGS, lambda: None)
    chunked = replace(engine.facts, max_batched_tokens=generator.randint(16, 80))
    cell = Cell(lambda: TorchEngine(chunked, engine.decoder, engine.kernels, engine.pool))
    cell.join()
    common = [generator.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts = [common, [*common, 7], common[:33], *(random_tokens(generator) for _ in range(3))]
    cell.submit(common[:-1], GREEDY)
    cell.run()
    requests = [cell.submit(prompt, WHOLE) for prompt in prompts]
    cell.submit(random_tokens(generator), GREEDY)
    cell.run()
    cell.assert_idle()
    assert cell.planner.prefix_hits == 3 * 32
    for request, prompt in zip(requests, prompts, strict=True):
        found = numbers(cell.clients[request].embedding)
        with ExpertMargins() as experts:
            right = expected(oracle, prompt)
        if experts.clear:
            torch.testing.assert_close(found, right, rtol=0, atol=2e-5)


def published_for_embeddings(folder: Path, name: str) -> Path:
    """A model as Qwen3-Embedding-8B lies on the hub: its layers alone, and a tokenizer that ends
    texts.
    """
    made = make_model(name, folder)
    AutoModel.from_pretrained(made).save_pretrained(made)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS)]
    )
    tokenizer.save(str(made / "tokenizer.json"))
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    modules = [{"type": f"sentence_transformers.models.{each}"} for each in ("Transformer",)]
    modules += [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (made / "modules.json").write_text(json.dumps(modules))
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return made


def test_a_model_that_was_published_for_embeddings(
    tmp_path: Path, generator: random.Random
) -> None:
    folder = published_for_embeddings(tmp_path / "model", "qwen3")
    prepared = prepare(str(folder), tmp_path)
    manifest = Manifest.load(prepared)
    assert (manifest.writes, manifest.embeds) == (False, True)
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    assert tokenizer.encode("a text").ids[-1] == EOS
    prompt = [*random_tokens(generator), EOS]
    (stream,) = Driver(load_engine(prepared, SETTINGS, lambda: None)).run([prompt], [WHOLE])
    wanted = expected(AutoModel.from_pretrained(folder), prompt)
    torch.testing.assert_close(numbers(stream.embedding), wanted, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def engine(prepared_model: Prepared) -> TorchEngine:
    return load_engine(prepared_model("qwen3"), SETTINGS, lambda: None)


@pytest.mark.parametrize("name", ["qwen3", "cohere2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_do_not_depend_on_their_company(
    name: str, dtype: str, prepared_model: Prepared, generator: random.Random
) -> None:
    engine = load_engine(prepared_model(name), replace(SETTINGS, dtype=dtype), lambda: None)
    prompts = [random_tokens(generator) for _ in range(8)]
    params = [cut_to(generator.choice([0, 1, 24, 64, 65])) for _ in prompts]
    alone = [
        Driver(engine).run([prompt], [each])[0].embedding
        for prompt, each in zip(prompts, params, strict=True)
    ]
    for chunk, lookahead in ((1000, False), (16, True), (generator.randint(1, 50), True)):
        driver = Driver(engine, chunk=chunk, lookahead=lookahead, seed=chunk)
        others = [random_tokens(generator) for _ in range(3)]
        streams = driver.run([*prompts, *others], [*params, *[GREEDY] * 3])
        assert embeddings(streams[: len(prompts)]) == alone


def cut_to(dimensions: int) -> SamplingParams:
    return SamplingParams(max_tokens=0, seed=0, embedding=dimensions)


def test_as_on_a_gpu(engine: TorchEngine, generator: random.Random) -> None:
    """Read after the next step was ordered; the last tokens in steps that are replayed."""
    prompts = [random_tokens(generator) for _ in range(6)]
    alone = embeddings(Driver(engine).run(prompts, [WHOLE] * 6))
    recorder = Recorder()
    for twin in (as_on_gpu(engine), as_on_gpu(engine, [1, 2, 4, 6], recorder)):
        for chunk in (1, 16):
            driver = Driver(twin, chunk=chunk, lookahead=True)
            assert embeddings(driver.run(prompts, [WHOLE] * 6)) == alone
    assert recorder.replays > 0


@pytest.mark.parametrize("dimensions", [1, 24, 63, 64, 65])
def test_they_are_cut_and_have_length_1(
    dimensions: int, engine: TorchEngine, generator: random.Random
) -> None:
    prompt = random_tokens(generator)
    whole, cut = (
        numbers(Driver(engine).run([prompt], [cut_to(each)])[0].embedding)
        for each in (0, dimensions)
    )
    assert len(whole) == 64
    assert len(cut) == min(dimensions, 64)
    torch.testing.assert_close(whole.norm(), torch.tensor(1.0))
    torch.testing.assert_close(cut, F.normalize(whole[:dimensions], dim=0))


def test_one_that_is_not_finite_fails_alone(
    tmp_path: Path, small_model: Prepared, generator: random.Random
) -> None:
    folder = shutil.copytree(small_model("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    engine = load_engine(prepare(str(folder), tmp_path), SETTINGS, lambda: None)
    without_it = partial(filter, (7).__ne__)
    prompts = [[8, *without_it(random_tokens(generator))] for _ in range(3)]
    alone = embeddings(Driver(engine).run(prompts, [WHOLE] * 3))
    *others, spoiled = Driver(engine).run([*prompts, [*prompts[0], 7]], [WHOLE] * 4)
    assert embeddings(others) == alone
    assert spoiled.embedding is None
    assert spoiled.errors == ["the model's hidden state is not finite"]
