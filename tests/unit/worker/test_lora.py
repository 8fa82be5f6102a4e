"""Rows with LoRA adapters are what transformers makes of a model with the adapter merged into it;
and the bits of a row depend on its own adapter alone.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagefleet.manifest import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, Adapter, Manifest
from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import unpack_floats
from pagefleet_kernels.dispatch import select
from pagefleet_worker.interface import PlanError
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.config import DecoderConfig, load_config
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.lora import read_adapter
from pagefleet_worker.model.shares import Share
from pagefleet_worker.model.weights import load_weights
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.model_loading import Means, load_model
from pagefleet_worker.prepare import prepare
from pagefleet_worker.step.engine import TorchEngine
from tests.driver import Driver, Stream
from tests.gpu_twin import Recorder, as_on_gpu
from tests.lora import KINDS, make_adapter, merged, with_adapters
from tests.models import VOCAB_SIZE
from tests.ties import ExpertMargins
from tests.unit.worker.test_group import group_of
from tests.unit.worker.test_weights import files_of

SETTINGS = WorkerSettings(num_blocks=100, max_num_seqs=32, device="cpu", dtype="float32")
TOKENS = 6
CPU = torch.device("cpu")
NAME = "base_model.model.model.layers.{}.{}.lora_{}.weight"

Prepared = Callable[[str], Path]

COMPUTED = pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8")],
)


@dataclass
class Adapted:
    """A model with adapters, the same without, and transformers' models of each."""

    folder: Path
    plain: Path
    oracles: list[torch.nn.Module]

    def engine(self, **changes: Any) -> TorchEngine:
        return load_engine(self.folder, replace(SETTINGS, **changes), lambda: None)


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory, small_model: Prepared, prepared_model: Prepared
) -> Callable[[str], Adapted]:
    made: dict[str, Adapted] = {}

    def model(name: str) -> Adapted:
        if name not in made:
            folder, oracles = with_adapters(small_model(name), tmp_path_factory.mktemp(name))
            made[name] = Adapted(folder, prepared_model(name), oracles)
        return made[name]

    return model


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(autouse=True)
def memory_that_nobody_wrote_is_poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


def asked(generator: random.Random, count: int = 8) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, of which each adapter and the base model have some."""
    prompts = [
        [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 60))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=TOKENS,
            seed=0,
            temperature=0,
            logprobs=0,
            prompt_logprobs=0 if index % 3 else None,
            adapter=index % (len(KINDS) + 1),
        )
        for index in range(count)
    ]
    order = generator.sample(range(count), count)
    return prompts, [params[index] for index in order]


def seen(stream: Stream) -> tuple[object, ...]:
    prompt = [float(each) for _, part in stream.prompt_logprobs for each in _chosen(part)]
    return stream.output, stream.logprobs, prompt, stream.errors


def _chosen(logprobs: Any) -> list[float]:
    return unpack_floats(logprobs.chosen).tolist()


@torch.inference_mode()
def errors(stream: Stream, oracle: torch.nn.Module) -> list[float]:
    """How far the logprobs of the output, and of the prompt where asked for, are off."""
    tokens = torch.tensor([stream.prompt + stream.output])
    logprobs = oracle(tokens).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    found = [value for each in stream.logprobs for value in _chosen(each)]
    if stream.params.prompt_logprobs is None:
        expected = expected[len(stream.prompt) - 1 :]
    else:
        found = [v for _, part in stream.prompt_logprobs for v in _chosen(part)] + found
    return (torch.tensor(found) - expected).abs().tolist()


@torch.inference_mode()
def check_greedy(stream: Stream, oracle: torch.nn.Module) -> None:
    """Tokens and logprobs are the oracle's, if it takes its experts clearly."""
    with ExpertMargins() as experts:
        logits = oracle(torch.tensor([stream.prompt + stream.output])).logits[0]
    if not experts.clear:
        return
    scores = logits[len(stream.prompt) - 1 : -1]
    chosen = scores.gather(1, torch.tensor(stream.output)[:, None])[:, 0]
    assert (chosen >= scores.amax(1) - 1e-4).all()
    assert max(errors(stream, oracle)) < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "llama-biases",
        "qwen3",
        "gemma2",
        "phi3-partial",
        pytest.param("qwen3-moe", marks=pytest.mark.slow),
        pytest.param("deepseek-v2-lite", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", marks=pytest.mark.slow),
    ],
)
def test_streams_are_those_of_merged_models(
    name: str, adapted: Callable[[str], Adapted], generator: random.Random
) -> None:
    model = adapted(name)
    engine = model.engine()
    prompts, params = asked(generator)
    for chunk, lookahead in ((7, True), (1000, False)):
        for stream in Driver(engine, chunk=chunk, lookahead=lookahead).run(prompts, params):
            check_greedy(stream, model.oracles[stream.params.adapter])


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("float32", "int8")])
def test_rounded_numbers_are_near_those_of_merged_models(
    dtype: str, quantization: str, adapted: Callable[[str], Adapted], generator: random.Random
) -> None:
    """And as near as the base model is to itself."""
    model = adapted("qwen3")
    engine = model.engine(dtype=dtype, quantization=quantization)
    streams = Driver(engine).run(*asked(generator, 24))
    of_base: list[float] = []
    of_adapters: list[float] = []
    for stream in streams:
        number = stream.params.adapter
        (of_adapters if number else of_base).extend(errors(stream, model.oracles[number]))

    def typical(found: list[float]) -> float:
        return float(torch.tensor(found).square().mean().sqrt())

    assert 1e-4 < typical(of_base) < 0.1
    assert typical(of_adapters) < 3 * typical(of_base)


@COMPUTED
def test_bits_do_not_depend_on_the_company(
    dtype: str, quantization: str, adapted: Callable[[str], Adapted], generator: random.Random
) -> None:
    model = adapted("qwen3")
    engine = model.engine(dtype=dtype, quantization=quantization)
    assert engine.facts.exact
    prompts, params = asked(generator)
    together = [seen(stream) for stream in Driver(engine, chunk=9).run(prompts, params)]
    alone = [
        seen(Driver(engine).run([prompt], [each])[0])
        for prompt, each in zip(prompts, params, strict=True)
    ]
    assert together == alone
    assert isinstance(engine.decoder, Decoder)
    with patch.object(engine.decoder, "hidden", engine.decoder.hidden_by_layer):
        by_layer = [seen(stream) for stream in Driver(engine, chunk=20).run(prompts, params)]
    assert together == by_layer
    on_gpu = as_on_gpu(engine, [1, 4, 16], Recorder())
    replayed = Driver(on_gpu, chunk=20, lookahead=True).run(prompts, params)
    assert together == [seen(stream) for stream in replayed]


@COMPUTED
def test_the_base_model_has_the_bits_that_it_has_without_adapters(
    dtype: str, quantization: str, adapted: Callable[[str], Adapted], generator: random.Random
) -> None:
    model, changes = adapted("qwen3"), {"dtype": dtype, "quantization": quantization}
    plain = load_engine(model.plain, replace(SETTINGS, **changes), lambda: None)
    prompts, params = asked(generator)
    expected = [
        seen(Driver(plain).run([prompt], [each])[0])
        for prompt, each in zip(prompts, params, strict=True)
        if not each.adapter
    ]
    streams = Driver(model.engine(**changes), chunk=11).run(prompts, params)
    assert [seen(stream) for stream in streams if not stream.params.adapter] == expected


def test_an_adapter_has_the_same_bits_whatever_others_are_loaded(
    tmp_path: Path, small_model: Prepared, generator: random.Random
) -> None:
    model = small_model("llama")
    for kind in KINDS:
        make_adapter(kind, model, tmp_path / kind)
    prompt = [generator.randrange(VOCAB_SIZE) for _ in range(30)]
    params = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0, logprobs=0, adapter=1)
    found = []
    for kinds in (["odd"], ["odd", "all", "few"]):
        adapters = {kind: str(tmp_path / kind) for kind in kinds}
        engine = load_engine(prepare(str(model), tmp_path, adapters=adapters), SETTINGS, _nothing)
        found.append(seen(Driver(engine).run([prompt], [params])[0]))
    assert found[0] == found[1]


def _nothing() -> None: ...


def test_drafts_and_forks_keep_their_adapter(
    adapted: Callable[[str], Adapted], generator: random.Random
) -> None:
    engine = adapted("llama-biases").engine()
    prompt = [generator.randrange(VOCAB_SIZE) for _ in range(30)]
    params = SamplingParams(max_tokens=TOKENS, seed=3, logprobs=0, adapter=2)
    (expected,) = Driver(engine).run([prompt], [params])
    driver = Driver(as_on_gpu(engine, [1, 8], Recorder()))
    stream = driver.open(prompt, params)
    driver.step([stream]).land()
    twin = driver.fork(stream, 0, stream.output[0])
    twin.output, twin.asked = expected.output[:-1], TOKENS - 1
    flight = driver.step([twin], logits=TOKENS - 1)
    twin.output = expected.output[:1]
    flight.land()
    assert twin.output == expected.output


@pytest.mark.parametrize("file", [ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE])
def test_one_that_changed_after_it_was_prepared(
    file: str, tmp_path: Path, small_model: Prepared
) -> None:
    model = small_model("llama")
    make_adapter("few", model, tmp_path / "few")
    folder = prepare(str(model), tmp_path, adapters={"few": str(tmp_path / "few")})
    other = tmp_path / "other"
    make_adapter("few", model, other, seed=1)
    (other / ADAPTER_CONFIG_FILE).write_text(
        json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 3})
    )
    (other / file).rename(tmp_path / "few" / file)
    with pytest.raises(ModelError, match=r"have changed since .* was made from them"):
        load_engine(folder, SETTINGS, _nothing)


def test_an_adapter_that_is_not_there(adapted: Callable[[str], Adapted]) -> None:
    engine = adapted("llama-biases").engine()
    params = SamplingParams(max_tokens=1, seed=0, adapter=len(KINDS) + 1)
    with pytest.raises(PlanError, match="no adapter 4"):
        Driver(engine).run([[1]], [params])


def test_models_that_transformers_computes_have_none(
    tmp_path: Path, prepared_model: Prepared
) -> None:
    manifest = Manifest.load(prepared_model("gpt2"))
    manifest = msgspec.structs.replace(manifest, adapters=(Adapter("a", str(tmp_path)),))
    means = Means(CPU, select(CPU), 10, _nothing)
    with pytest.raises(ModelError, match=r"not for gpt2: leave out --lora-modules"):
        load_model(tmp_path, manifest, SETTINGS, means)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama", 2), ("llama-tied", 4), ("qwen3", 2), ("phi3-partial", 2), ("glm4", 2)],
)
def test_a_rank_has_the_share_of_an_adapter_that_it_has_of_the_merged_model(
    name: str, ranks: int, kind: str, tmp_path: Path, small_model: Prepared
) -> None:
    """Also where several ranks hold the same keys and values, and where modules are stacked."""
    model, config = small_model(name), load_config(small_model(name))
    merged(model, make_adapter(kind, model, tmp_path / "adapter")).save_pretrained(tmp_path / "all")
    adapter = read_adapter(tmp_path / "adapter", config)
    for share in (Share(rank, ranks) for rank in range(ranks)):
        before, after = (
            load_weights(
                files_of(folder), config, torch.float32, CPU, lambda *_: None, share=share
            ).layers
            for folder in (model, tmp_path / "all")
        )
        changes = adapter.layers(config, torch.float32, CPU, share)
        for plain, changed, factors in zip(before, after, changes, strict=True):
            for field in config.modules:
                matrix = getattr(plain, field)
                for each in factors[field]:
                    outputs = slice(each.first, each.first + len(each.up))
                    matrix[outputs] += each.scale * each.up @ each.down
                torch.testing.assert_close(matrix, getattr(changed, field), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama-biases", 2),
        *(
            pytest.param(name, ranks, marks=pytest.mark.slow)
            for name, ranks in (("llama-tied", 4), ("phi3-partial", 2), ("qwen3-moe", 2))
        ),
    ],
)
def test_ranks_add_up_what_merged_models_compute(
    name: str, ranks: int, adapted: Callable[[str], Adapted], generator: random.Random
) -> None:
    """To the same bits in every company."""
    model = adapted(name)
    prompts, params = asked(generator)
    with group_of(ranks, model.folder) as group:
        together = Driver(group, chunk=7, lookahead=True).run(prompts, params)
        alone = [
            Driver(group).run([prompt], [each])[0]
            for prompt, each in zip(prompts, params, strict=True)
        ]
    for stream in together:
        check_greedy(stream, model.oracles[stream.params.adapter])
    assert [seen(each) for each in together] == [seen(each) for each in alone]


@pytest.mark.slow
def test_ranks_give_the_base_model_the_bits_that_it_has_without_adapters(
    adapted: Callable[[str], Adapted], generator: random.Random
) -> None:
    model = adapted("llama-biases")
    prompts, params = asked(generator)
    params = [each for each in params if not each.adapter]
    found = []
    for folder in (model.plain, model.folder):
        with group_of(2, folder) as group:
            streams = Driver(group, chunk=9).run(prompts[: len(params)], params)
            found.append([seen(each) for each in streams])
    assert found[0] == found[1]


@pytest.fixture
def saved(tmp_path: Path, small_model: Prepared) -> Path:
    """An adapter that can be read, to be spoiled."""
    make_adapter("odd", small_model("llama"), tmp_path)
    return tmp_path


@pytest.fixture
def config(prepared_model: Prepared) -> DecoderConfig:
    return load_config(prepared_model("llama"))


def test_what_an_adapter_holds(saved: Path, config: DecoderConfig) -> None:
    adapter = read_adapter(saved, config)
    assert len(adapter.modules) == 9
    assert adapter.modules[0, "self_attn.q_proj"].scale == pytest.approx(7 / 3**0.5)
    assert adapter.modules[1, "mlp.up_proj"].scale == pytest.approx(4 / 20**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_of_16_bits(dtype: torch.dtype, saved: Path, config: DecoderConfig) -> None:
    tensors = {
        name: each.to(dtype) for name, each in load_file(saved / ADAPTER_WEIGHTS_FILE).items()
    }
    save_file(tensors, saved / ADAPTER_WEIGHTS_FILE)
    changes = list(read_adapter(saved, config).layers(config, torch.float32, CPU))
    (query, value) = changes[2]["qkv"]
    assert torch.equal(query.down, tensors[NAME.format(2, "self_attn.q_proj", "A")].float())
    assert (value.first, value.rank, value.up.shape) == (64 + 32, 5, (32, 5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "of the type 'IA3'; only LORA is"),
        ({"peft_type": None}, "of the type None"),
        ({"use_dora": True}, "asks for use_dora: True, which is not served"),
        ({"bias": "all"}, "asks for bias: 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"asks for modules_to_save: \['lm_head'\]"),
        ({"init_lora_weights": "pissa"}, "asks for init_lora_weights: 'pissa'"),
        ({"alora_invocation_tokens": [1], "lora_bias": True}, "lora_bias: True, alora_invoc"),
        ({"r": "8"}, "malformed: Expected `int`, got `str` - at `\\$.r`"),
        ({"r": 0}, "a rank is at least 1"),
        ({"lora_alpha": float("nan")}, "malformed"),
        ({"lora_alpha": 1e308}, "malformed: .* alpha is finite"),
        ({"alpha_pattern": {"(": 1}}, "malformed"),
        ({"alpha_pattern": {"(?i)Q_PROJ": 1}}, "malformed: global flags"),
        ({"rank_pattern": {"(.|.)*[A-Z]": 1}}, "A pattern of .* takes too long to be compared"),
        ({"alpha_pattern": {"(.|.)" * 28 + "[A-Z]": 1}}, "A pattern of .* takes too long"),
        ({"r": 4}, r"is F32 \[3, 64\], but the model and the adapter's config say \[4, 64\]"),
    ],
)
def test_configs_that_are_not_served(
    changes: dict[str, Any], reason: str, saved: Path, config: DecoderConfig
) -> None:
    values = json.loads((saved / ADAPTER_CONFIG_FILE).read_text())
    (saved / ADAPTER_CONFIG_FILE).write_text(json.dumps(values | changes))
    with pytest.raises(ModelError, match=reason):
        read_adapter(saved, config)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        (NAME.format(3, "mlp.up_proj", "A"), (3, 64), "the last of its 3 is 2. The adapter is for"),
        (NAME.format(0, "mlp.up_proj", "B"), (95, 3), r"\[95, 3\], but .* say \[96, 3\]"),
        (
            NAME.format(0, "mlp.down_proj", "A"),
            (3, 96),
            "only one of lora_A and lora_B of layers.0",
        ),
        (NAME.format(0, "mlp.experts.0.up_proj", "A"), (3, 64), "is not served: of LoRA only"),
        ("base_model.model.lm_head.lora_A.weight", (3, 64), "is not served: of LoRA only A and B"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (3, 272), "is not served"),
        ("base_model.model.lm_head.weight", (272, 64), "is not served"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", (96,), "not served"),
        (NAME.format("00", "mlp.up_proj", "A"), (3, 64), "is not served"),
        (NAME.format("\u0660", "mlp.up_proj", "A"), (3, 64), "is not served"),
        (NAME.format("9" * 5000, "mlp.up_proj", "A"), (3, 64), "is not served"),
        (
            NAME.format(0, "mlp.up_proj", "A").replace("model.model.", "model.", 1),
            (3, 64),
            "which stand for one tensor",
        ),
    ],
)
def test_tensors_that_are_not_served(
    name: str, shape: tuple[int, ...], reason: str, saved: Path, config: DecoderConfig
) -> None:
    save_file(
        load_file(saved / ADAPTER_WEIGHTS_FILE) | {name: torch.ones(shape)},
        saved / ADAPTER_WEIGHTS_FILE,
    )
    with pytest.raises(ModelError, match=reason):
        read_adapter(saved, config)


def test_what_makes_keys_and_values_of_latents_has_none(
    tmp_path: Path, prepared_model: Prepared
) -> None:
    (tmp_path / ADAPTER_CONFIG_FILE).write_text(
        json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 3})
    )
    tensors = {NAME.format(0, "self_attn.kv_b_proj", factor): torch.ones(3, 3) for factor in "AB"}
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS_FILE)
    with pytest.raises(ModelError, match="only A and B of q_a_proj, kv_a_proj_with_mqa, q_b_proj"):
        read_adapter(tmp_path, load_config(prepared_model("deepseek-v3")))


@pytest.mark.parametrize("part", ["mlp.gate", "mlp.experts.1.up_proj", "mlp.up_proj"])
def test_experts_have_none(part: str, tmp_path: Path, prepared_model: Prepared) -> None:
    (tmp_path / ADAPTER_CONFIG_FILE).write_text(
        json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 3})
    )
    tensors = {NAME.format(0, part, factor): torch.ones(3, 3) for factor in "AB"}
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS_FILE)
    with pytest.raises(ModelError, match="it changes experts or their router"):
        read_adapter(tmp_path, load_config(prepared_model("qwen3-moe")))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.bfloat16),
        (7e4, torch.float16),
    ],
)
def test_tensors_of_no_numbers(
    value: float, dtype: torch.dtype, saved: Path, config: DecoderConfig
) -> None:
    tensors = load_file(saved / ADAPTER_WEIGHTS_FILE)
    tensors[NAME.format(2, "mlp.up_proj", "B")][5, 1] = value
    save_file(tensors, saved / ADAPTER_WEIGHTS_FILE)
    adapter = read_adapter(saved, config)
    with pytest.raises(
        ModelError, match=r"layers\.2\.mlp\.up_proj\.lora_B\.weight' in .* holds NaN"
    ):
        list(adapter.layers(config, dtype, CPU))


def test_files_that_are_not_there(saved: Path, config: DecoderConfig) -> None:
    (saved / ADAPTER_WEIGHTS_FILE).write_bytes(b"nothing")
    with pytest.raises(ModelError, match="is no safetensors file"):
        read_adapter(saved, config)
    save_file({}, saved / ADAPTER_WEIGHTS_FILE)
    with pytest.raises(ModelError, match="holds no tensor"):
        read_adapter(saved, config)
    (saved / ADAPTER_WEIGHTS_FILE).rename(saved / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"lacks adapter_model.safetensors. .* are never read"):
        read_adapter(saved, config)
    (saved / ADAPTER_CONFIG_FILE).unlink()
    with pytest.raises(ModelError, match=r"lacks adapter_config.json: it is no adapter in PEFT's"):
        read_adapter(saved, config)


def test_tensors_of_numbers_that_are_not_read(saved: Path, config: DecoderConfig) -> None:
    tensors = {
        name: each.to(torch.int8) for name, each in load_file(saved / ADAPTER_WEIGHTS_FILE).items()
    }
    save_file(tensors, saved / ADAPTER_WEIGHTS_FILE)
    with pytest.raises(ModelError, match=r"is I8 .* in F32 or F16 or BF16"):
        read_adapter(saved, config)
