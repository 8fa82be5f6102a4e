"""Guided streams of the torch engine, from a model whose random weights want nothing of it."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pagefleet.params import Guide, SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet_worker.loading import load_engine
from pagefleet_worker.sampling.draw import Draw
from pagefleet_worker.sampling.shaping import shape
from pagefleet_worker.step.engine import TorchEngine
from tests.driver import Driver, Stream
from tests.gpu_twin import as_on_gpu
from tests.models import EOS, VOCAB_SIZE
from tests.schemas import random_schema

SETTINGS = WorkerSettings(num_blocks=400, max_num_seqs=32, device="cpu", dtype="float32")
COMPACT = {"whitespace_flexible": False}


@pytest.fixture
def draw() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture(scope="module")
def folder(prepared_model: Callable[[str], Path]) -> Path:
    return prepared_model("llama")


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return load_engine(folder, SETTINGS, lambda: None)


def guided_by(schema: object, draw: random.Random) -> SamplingParams:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)
    return SamplingParams(
        max_tokens=120,
        seed=draw.randrange(2**64),
        temperature=draw.choice([0, 1.0, 2.0]),
        top_k=draw.choice([0, 5]),
        frequency_penalty=draw.choice([0.0, 0.5]),
        eos_token_ids=(EOS,),
        guide=Guide(grammar),
    )


def output(stream: Stream) -> list[int]:
    """Up to its end: the driver goes on to `max_tokens`."""
    end = stream.output.index(EOS) if EOS in stream.output else len(stream.output)
    return stream.output[:end]


def random_prompts(draw: random.Random, count: int) -> list[list[int]]:
    return [[draw.randrange(256) for _ in range(draw.randint(1, 40))] for _ in range(count)]


def test_texts_are_valid_under_their_schemas(
    engine: TorchEngine, folder: Path, draw: random.Random
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    schemas = [random_schema(draw) for _ in range(24)]
    params = [guided_by(schema, draw) for schema in schemas]
    streams = Driver(engine).run(random_prompts(draw, len(schemas)), params)
    ended = 0
    for schema, stream in zip(schemas, streams, strict=True):
        assert not stream.errors, schema
        if EOS in stream.output:
            jsonschema.validate(json.loads(tokenizer.decode(output(stream))), schema)
            ended += 1
    assert ended > len(schemas) / 2


def test_a_guided_stream_does_not_depend_on_its_company(
    engine: TorchEngine, draw: random.Random
) -> None:
    prompts = random_prompts(draw, 8)
    params = [guided_by(random_schema(draw), draw) for _ in prompts[:6]]
    params += [SamplingParams(max_tokens=40, seed=1, eos_token_ids=(EOS,))] * 2
    alone = [
        output(Driver(engine).run([prompt], [each])[0])
        for prompt, each in zip(prompts, params, strict=True)
    ]
    for chunk, lookahead in ((1000, False), (16, True)):
        streams = Driver(engine, chunk=chunk, lookahead=lookahead).run(prompts, params)
        assert [output(stream) for stream in streams] == alone


def test_a_step_launched_before_the_last_is_read(folder: Path, draw: random.Random) -> None:
    early = load_engine(folder, SETTINGS, lambda: None)
    late = as_on_gpu(early)
    prompts = random_prompts(draw, 4)
    params = [guided_by(random_schema(draw), draw) for _ in prompts]
    expected = [output(stream) for stream in Driver(early).run(prompts, params)]
    streams = Driver(late, lookahead=True).run(prompts, params)
    assert [output(stream) for stream in streams] == expected


def test_choices_are_forked_into_places_of_their_own(
    engine: TorchEngine, draw: random.Random
) -> None:
    params = guided_by({"enum": [f"number {number}" for number in range(64)]}, draw)
    prompt = random_prompts(draw, 1)[0]
    driver = Driver(engine)
    stream = driver.open(prompt, params, choices=(0, 1))
    driver.step([stream]).land()
    first, second = stream.output
    twin = driver.fork(stream, 1, second)
    driver.forks += [stream.slot, stream.slot, 0]
    stream.output, stream.asked, stream.choices = [first], 1, [0]
    while not (stream.done and twin.done):
        driver.step([each for each in (stream, twin) if not each.done]).land()
    again = Driver(engine)
    alone = [again.open(prompt, params, choices=[choice]) for choice in (0, 1)]
    while not all(each.done for each in alone):
        again.step([each for each in alone if not each.done]).land()
    assert [output(stream), output(twin)] == [output(each) for each in alone]


def test_a_grammar_that_fails_ends_its_row_alone(engine: TorchEngine, draw: random.Random) -> None:
    bad = SamplingParams(max_tokens=8, seed=1, guide=Guide("start: missing"))
    good = SamplingParams(max_tokens=8, seed=1)
    failed, other = Driver(engine).run(random_prompts(draw, 2), [bad, good])
    assert "missing" in failed.errors[0]
    assert not other.errors
    assert len(other.output) == 8


def test_masks_come_before_everything_else(draw: random.Random) -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    bits = np.random.default_rng(draw.randrange(2**32)).random((3, 288)) < 0.3
    masks = [np.packbits(row, bitorder="little").tobytes() for row in bits]
    params = SamplingParams(max_tokens=8, seed=1, logit_bias={7: 100.0})
    draws = [Draw(row, params, [1], 1, 0, 0, mask) for row, mask in enumerate(masks)]
    draws[1] = Draw(1, params, [1], 1, 0, 0)
    scores = logits.clone()
    shape(scores, draws)
    for row, expected in enumerate(logits.clone()):
        expected[7] += 100
        if row != 1:
            expected[~torch.from_numpy(bits[row, :VOCAB_SIZE])] = -torch.inf
        assert torch.equal(scores[row], expected)
