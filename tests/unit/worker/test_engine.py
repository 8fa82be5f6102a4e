import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from pagefleet.params import Guide, SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import Logprobs, Plan, pack_ints, unpack_floats, unpack_ints
from pagefleet_worker.interface import PlanError
from pagefleet_worker.loading import Limits, load_engine, run_full_step
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.prepare import prepare
from pagefleet_worker.sampling.draw import NO_TOKEN
from pagefleet_worker.step.engine import TorchEngine
from tests.driver import Driver, Stream
from tests.gguf_models import write_gguf
from tests.gpu_twin import Recorder, as_on_gpu
from tests.models import COUSINS, LATENTS, VARIANTS, VOCAB_SIZE, make_model

SETTINGS = WorkerSettings(num_blocks=200, max_num_seqs=32, device="cpu", dtype="float32")

Prepared = Callable[[str], Path]

Piece = tuple[float, list[int], list[float]]
"""Logprobs of one token: its own, and the ids and values of the best."""


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def engine(prepared_model: Prepared) -> TorchEngine:
    return load_engine(prepared_model("llama"), SETTINGS, lambda: None)


@pytest.fixture(scope="module")
def oracle(small_model: Prepared) -> torch.nn.Module:
    return load_oracle(small_model("llama"))


def load_oracle(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def random_prompts(generator: random.Random, count: int, longest: int = 100) -> list[list[int]]:
    lengths = [generator.randint(1, longest) for _ in range(count)]
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def positions_compared(oracle: torch.nn.Module, stream: Stream) -> int:
    """Assert that each token is the oracle's own choice behind those before it.

    Either will do where its best two are too close; how often they are not is returned.
    """
    tokens = torch.tensor([stream.prompt + stream.output])
    logits = oracle(tokens).logits[0, len(stream.prompt) - 1 : -1]
    best, ids = logits.topk(2)
    clear = best[:, 0] - best[:, 1] >= 1e-4
    output = torch.tensor(stream.output)
    assert torch.equal(output[clear], ids[clear, 0])
    assert (output[:, None] == ids).any(dim=1).all()
    return int(clear.sum())


@pytest.mark.parametrize(
    "name",
    [
        *VARIANTS,
        "deepseek-v3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in [*COUSINS, *LATENTS]
            if name != "deepseek-v3"
        ),
    ],
)
def test_greedy_tokens_are_transformers(
    name: str, small_model: Prepared, prepared_model: Prepared, generator: random.Random
) -> None:
    oracle = load_oracle(small_model(name))
    engine = load_engine(prepared_model(name), SETTINGS, lambda: None)
    prompts = random_prompts(generator, 6)
    greedy = SamplingParams(max_tokens=12, seed=0, temperature=0)
    for chunk, lookahead in ((16, False), (64, True), (1000, False)):
        streams = Driver(engine, chunk=chunk, lookahead=lookahead).run(prompts, [greedy] * 6)
        compared = sum(positions_compared(oracle, stream) for stream in streams)
        assert compared >= 0.9 * 12 * len(prompts)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3", {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 3}),
        ("phi3", {"head_dim": 16}),
    ],
)
def test_greedy_tokens_of_a_gguf_file_are_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path, generator: random.Random
) -> None:
    folder = make_model(name, tmp_path / "model", **changes)
    path = write_gguf(tmp_path / "model.gguf", folder, ["F32"])
    prepared = prepare(str(path), tmp_path, tokenizer=str(folder))
    oracle, engine = load_oracle(folder), load_engine(prepared, SETTINGS, lambda: None)
    greedy = SamplingParams(max_tokens=12, seed=0, temperature=0)
    prompts = random_prompts(generator, 4)
    streams = Driver(engine, chunk=30).run(prompts, [greedy] * 4)
    compared = sum(positions_compared(oracle, stream) for stream in streams)
    assert compared >= 0.9 * 12 * len(prompts)


@pytest.mark.parametrize("inner", [False, True], ids=["published", "inner"])
def test_the_text_model_of_one_that_sees(
    inner: bool, tmp_path: Path, small_model: Prepared, generator: random.Random
) -> None:
    """As Gemma 3 is published from 4B on: its text config leaves out what has defaults; and with
    names as the model has them inside.
    """
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    sees = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sees |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=dict(text), vision_config=sees)
    oracle = Gemma3ForConditionalGeneration(config).eval()
    for weight in oracle.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    folder = tmp_path / "model"
    oracle.save_pretrained(folder)
    if inner:
        tensors = load_file(folder / "model.safetensors")
        renamed = {
            name.replace("language_model.model.", "model.language_model."): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"text_config": text}
    (folder / "config.json").write_text(json.dumps(values))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_model("llama") / name, folder / name)
    engine = load_engine(prepare(str(folder), tmp_path), SETTINGS, lambda: None)
    assert isinstance(engine.decoder, Decoder)
    greedy = SamplingParams(max_tokens=12, seed=0, temperature=0)
    prompts = random_prompts(generator, 4)
    streams = Driver(engine, chunk=30).run(prompts, [greedy] * 4)
    compared = sum(positions_compared(oracle, stream) for stream in streams)
    assert compared >= 0.9 * 12 * len(prompts)


def seen(stream: Stream) -> tuple[object, ...]:
    """All that a client sees of a stream, to the bit."""
    return stream.output, stream.logprobs, pieces(stream)


def pieces(stream: Stream) -> list[Piece]:
    """The logprobs of the prompt, token by token, however they were cut."""
    found: list[Piece] = []
    for position, logprobs in stream.prompt_logprobs:
        assert position == len(found) + 1
        found += unpacked(logprobs)
    return found


def unpacked(logprobs: Logprobs) -> list[Piece]:
    chosen = unpack_floats(logprobs.chosen)
    ids, values = unpack_ints(logprobs.top_ids), unpack_floats(logprobs.top)
    width = len(ids) // len(chosen)
    parts = [slice(at * width, (at + 1) * width) for at in range(len(chosen))]
    return [
        (value, ids[part].tolist(), values[part].tolist())
        for value, part in zip(chosen, parts, strict=True)
    ]


def random_params(generator: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=generator.randint(1, 12),
        seed=generator.randrange(2**64),
        temperature=generator.choice([0, 0.7, 1.5]),
        top_p=generator.choice([1.0, 0.9]),
        top_k=generator.choice([0, 20]),
        repetition_penalty=generator.choice([1.0, 1.2]),
        frequency_penalty=generator.choice([0.0, 0.5]),
        logprobs=generator.choice([None, 0, 5]),
        prompt_logprobs=generator.choice([None, 3]),
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3", "float32"), ("qwen3", "bfloat16"), ("deepseek-v3", "bfloat16")],
)
def test_a_stream_does_not_depend_on_its_company(
    name: str, dtype: str, prepared_model: Prepared, generator: random.Random
) -> None:
    engine = load_engine(prepared_model(name), replace(SETTINGS, dtype=dtype), lambda: None)
    prompts = random_prompts(generator, 8, 90)
    params = [random_params(generator) for _ in prompts]
    alone = [
        seen(Driver(engine).run([prompt], [each])[0])
        for prompt, each in zip(prompts, params, strict=True)
    ]
    for chunk, lookahead in ((1000, False), (16, True), (generator.randint(1, 50), True)):
        driver = Driver(engine, chunk=chunk, lookahead=lookahead, seed=chunk)
        assert [seen(stream) for stream in driver.run(prompts, params)] == alone


def test_a_step_launched_before_the_last_is_read(
    engine: TorchEngine, generator: random.Random
) -> None:
    """As on a GPU, where what was sampled is known on the device alone."""
    prompts = random_prompts(generator, 6)
    params = [random_params(generator) for _ in prompts]
    expected = [seen(stream) for stream in Driver(engine).run(prompts, params)]
    streams = Driver(as_on_gpu(engine), chunk=16, lookahead=True).run(prompts, params)
    assert [seen(stream) for stream in streams] == expected


def test_decode_steps_that_are_replayed(engine: TorchEngine, generator: random.Random) -> None:
    """Padded to the sizes that were captured, and with larger steps between them."""
    prompts = random_prompts(generator, 7)
    params = [random_params(generator) for _ in prompts]
    expected = [seen(stream) for stream in Driver(engine).run(prompts, params)]
    recorder = Recorder()
    replayed = as_on_gpu(engine, [1, 2, 4, 6], recorder)
    assert recorder.sizes == [6, 4, 2, 1]
    streams = Driver(replayed, chunk=16, lookahead=True).run(prompts, params)
    assert [seen(stream) for stream in streams] == expected
    assert recorder.replays > 0


def test_logprobs_are_transformers(
    engine: TorchEngine, oracle: torch.nn.Module, generator: random.Random
) -> None:
    prompts = random_prompts(generator, 4)
    params = SamplingParams(max_tokens=8, seed=1, logprobs=4, prompt_logprobs=4)
    for stream in Driver(engine, chunk=32).run(prompts, [params] * 4):
        tokens = stream.prompt + stream.output
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        outputs = [each for logprobs in stream.logprobs for each in unpacked(logprobs)]
        found = pieces(stream) + outputs
        assert len(found) == len(tokens) - 1
        for row, token, (chosen, ids, values) in zip(expected, tokens[1:], found, strict=True):
            assert chosen == pytest.approx(row[token].item(), abs=1e-4)
            assert values == pytest.approx(row[ids].tolist(), abs=1e-4)
            assert values == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_choices_are_forked(engine: TorchEngine, generator: random.Random) -> None:
    """Choices share the prompt's blocks; each copies the one that it goes on writing."""
    (prompt,) = random_prompts(generator, 1)
    seed = generator.randrange(2**64)
    params = SamplingParams(max_tokens=6, seed=seed, temperature=1.3, presence_penalty=0.5)
    alone = []
    for choice in range(3):
        driver = Driver(engine)
        stream = driver.open(prompt, params, [choice])
        while not stream.done:
            driver.step([stream]).land()
        alone.append(stream.output)
    assert len({tuple(output) for output in alone}) > 1

    driver = Driver(engine)
    shared = driver.open(prompt, params, [0, 1, 2])
    driver.step([shared]).land()
    assert shared.output == [output[0] for output in alone]
    streams = [driver.fork(shared, *each) for each in enumerate(shared.output)]
    for _ in range(5):
        driver.step(streams).land()
    assert [stream.output for stream in streams] == alone


def test_drafts_are_judged_in_one_step(engine: TorchEngine, generator: random.Random) -> None:
    """A row that samples at several positions draws what it would have drawn one by one."""
    (prompt,) = random_prompts(generator, 1)
    params = msgspec.structs.replace(random_params(generator), max_tokens=6)
    (expected,) = Driver(engine).run([prompt], [params])
    driver = Driver(engine)
    stream = driver.open(prompt, params)
    stream.output, stream.asked = expected.output[:5], 5
    flight = driver.step([stream], logits=6)
    stream.output = []
    flight.land()
    assert (stream.output, stream.logprobs) == (expected.output, expected.logprobs)


def test_drafts_are_judged_in_a_step_that_is_replayed(
    engine: TorchEngine, generator: random.Random
) -> None:
    (prompt,) = random_prompts(generator, 1)
    params = msgspec.structs.replace(random_params(generator), max_tokens=6)
    (expected,) = Driver(engine).run([prompt], [params])
    recorder = Recorder()
    driver = Driver(as_on_gpu(engine, [1, 8], recorder))
    stream = driver.open(prompt, params)
    driver.step([stream]).land()
    stream.output, stream.asked, replays = expected.output[:5], 5, recorder.replays
    flight = driver.step([stream], logits=5)
    stream.output = expected.output[:1]
    flight.land()
    assert recorder.replays == replays + 1
    assert (stream.output, stream.logprobs) == (expected.output, expected.logprobs)


def test_no_token_behind_a_wrong_draft_is_no_error(engine: TorchEngine) -> None:
    params = SamplingParams(max_tokens=3, seed=1, allowed_token_ids=(5,), bad_words=((7, 5),))
    driver = Driver(engine)
    stream = driver.open([1, 2, 3], params)
    stream.output, stream.asked = [7], 1
    driver.step([stream], logits=2).land()
    assert (stream.output, stream.errors) == ([7, 5, NO_TOKEN], [])
    stream = driver.open([1, 2, 7], params)
    driver.step([stream]).land()
    assert len(stream.errors) == 1


def test_a_row_that_fails_fails_alone(
    tmp_path: Path, small_model: Prepared, generator: random.Random
) -> None:
    """A token whose embedding is NaN spoils its own stream; its blocks are used again."""
    folder = shutil.copytree(small_model("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    engine = load_engine(prepare(str(folder), tmp_path), SETTINGS, lambda: None)
    prompts = [[8 if token == 7 else token for token in p] for p in random_prompts(generator, 4)]
    without_it = SamplingParams(max_tokens=8, seed=1, logprobs=2, bad_words=((7,),))
    impossible = SamplingParams(max_tokens=8, seed=1, allowed_token_ids=(7,), bad_words=((7,),))
    params = [without_it, without_it, without_it, impossible]
    expected = [seen(stream) for stream in Driver(engine).run(prompts[:3], params[:3])]
    driver = Driver(engine)
    spoiled = [*prompts[:2], [*prompts[2], 7], prompts[3]]
    first, second, nan, forbidden = driver.run(spoiled, params)
    assert [seen(first), seen(second)] == expected[:2]
    assert len(nan.errors) == len(forbidden.errors) == 1
    assert not first.errors + second.errors
    driver.free = nan.table + forbidden.table + driver.free
    driver.free.reverse()
    assert [seen(stream) for stream in driver.run(prompts[:3], params[:3])] == expected


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    "impossible",
    [
        {"allowed_token_ids": (7,), "bad_words": ((7,),)},
        {"guide": Guide("start: missing")},
    ],
)
def test_a_row_that_failed_harms_none_in_the_step_that_was_ordered_before(
    engine: TorchEngine, generator: random.Random, on_gpu: bool, impossible: dict[str, Any]
) -> None:
    """That step feeds it a token that never was."""
    fine = SamplingParams(max_tokens=8, seed=1, logprobs=2)
    failing = SamplingParams(max_tokens=8, seed=1, **impossible)
    prompts = random_prompts(generator, 3)
    expected = [seen(stream) for stream in Driver(engine).run(prompts[:2], [fine] * 2)]
    driver = Driver(as_on_gpu(engine) if on_gpu else engine, lookahead=True)
    *streams, failed = driver.run(prompts, [fine, fine, failing])
    assert [seen(stream) for stream in streams] == expected
    assert failed.errors


def test_a_plan_that_contradicts_the_slots(engine: TorchEngine) -> None:
    engine.reset()
    with pytest.raises(PlanError, match="slot 3 is not open"):
        engine.launch(Plan(epoch=1, step=1, rows=b"", tokens=b"", release=pack_ints([3])))


def test_facts(prepared_model: Prepared) -> None:
    folder = prepared_model("mistral")
    facts = load_engine(folder, replace(SETTINGS, num_blocks=10), lambda: None).facts
    assert (facts.blocks, facts.block_size, facts.slots) == (10, 16, 32)
    assert facts.max_model_len == 160
    assert facts.vocab_size == VOCAB_SIZE
    assert "float32" in facts.numerics
    longer = load_engine(folder, replace(SETTINGS, max_model_len=300), lambda: None).facts
    assert longer.max_model_len == 300
    other = load_engine(folder, replace(SETTINGS, dtype="bfloat16"), lambda: None).facts
    assert other.numerics != facts.numerics
    quantized = load_engine(folder, replace(SETTINGS, quantization="int8"), lambda: None).facts
    assert "float32 int8" in quantized.numerics
    assert "inexact" not in quantized.numerics


@pytest.mark.parametrize("length", [512, 100])
def test_the_largest_step_can_be_computed(length: int, prepared_model: Prepared) -> None:
    layers: list[None] = []
    engine = load_engine(prepared_model("mistral"), SETTINGS, lambda: layers.append(None))
    layers.clear()
    run_full_step(engine.decoder, Limits.of(SETTINGS, engine.pool.device, length))
    assert len(layers) == 3


def test_a_device_that_is_not_there(prepared_model: Prepared) -> None:
    with pytest.raises(ModelError, match="no device 'tpu'"):
        load_engine(prepared_model("llama"), replace(SETTINGS, device="tpu"), lambda: None)


def test_quantization_that_the_files_do_not_have(prepared_model: Prepared) -> None:
    with pytest.raises(ModelError, match="--quantization gguf takes a"):
        load_engine(prepared_model("llama"), replace(SETTINGS, quantization="gguf"), lambda: None)


def test_quantization_in_a_type_that_a_cpu_does_not_multiply(prepared_model: Prepared) -> None:
    half = replace(SETTINGS, quantization="int8", dtype="float16")
    with pytest.raises(ModelError, match="--quantization int8 on a CPU with --dtype float16"):
        load_engine(prepared_model("llama"), half, lambda: None)


def test_blocks_that_the_kernels_cannot_use(prepared_model: Prepared) -> None:
    with pytest.raises(ModelError, match=r"--block-size 24 .* need a multiple of 16"):
        load_engine(prepared_model("llama"), replace(SETTINGS, block_size=24), lambda: None)


def test_a_length_that_the_model_does_not_have(prepared_model: Prepared) -> None:
    with pytest.raises(ModelError, match="knows 512 positions; --max-model-len 513 is more"):
        load_engine(prepared_model("llama"), replace(SETTINGS, max_model_len=513), lambda: None)
