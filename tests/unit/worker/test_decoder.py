import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet.manifest import Manifest
from pagefleet.params import SamplingParams
from pagefleet_kernels.dispatch import select
from pagefleet_worker.model.config import load_config
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.weights import INT8, PLAIN, Quantization, load_weights
from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.kv_scales import find_kv_scales
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.paging.slots import Row, Slot
from pagefleet_worker.prepare import prepare
from tests.checkpoints import CHECKPOINTS, write_checkpoint
from tests.models import COUSINS, LATENTS, MIXTURES, VARIANTS, VOCAB_SIZE, make_model
from tests.ties import ExpertMargins

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS = 16, 200
LONGEST = 150
NAN_IN_8_BITS = 0x7F

QUANTIZATIONS = pytest.mark.parametrize("matrices", [PLAIN, INT8], ids=["plain", "int8"])

WIDE_HEADS = {"mistral", "qwen3", "gemma2", "gemma3"}


def of_types(*names: str) -> pytest.MarkDecorator:
    """Models in float32 and bfloat16. Kernels are compiled for a type and a size of heads, which
    takes seconds: with narrow heads, bfloat16 is slow.
    """
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(name, dtype, marks=marks, id=f"{name}-{dtype}".replace("torch.", ""))
            for name in names
            for dtype, marks in (
                (torch.float32, ()),
                (torch.bfloat16, () if name in WIDE_HEADS else pytest.mark.slow),
            )
        ],
    )


Prepared = Callable[[str], Path]


class Model:
    """A decoder with a pool, which computes whole sequences in any schedule."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        matrices: Quantization = PLAIN,
        *,
        eight_bits: bool = False,
        longest: int = LONGEST,
    ) -> None:
        config = load_config(folder).within(longest)
        files = Manifest.load(folder).weights
        weights = load_weights(files, config, dtype, CPU, lambda loaded, total: None, matrices)
        self.layers = 0
        self.decoder = Decoder(config, weights, select(CPU), longest, self._count)
        if eight_bits:
            self.decoder.keep_kv_in_8_bits(find_kv_scales(self.decoder, BLOCK_SIZE, LONGEST))
        self.pool = make_pool(config, BLOCKS, BLOCK_SIZE, self.decoder.kv_dtype, CPU)

    def _count(self) -> None:
        self.layers += 1

    @torch.inference_mode()
    def logits(
        self, prompts: list[list[int]], chunk: Callable[[], int], generator: random.Random
    ) -> list[Tensor]:
        """The logits of every position of every prompt; `chunk` says how far a row goes on. All
        of the pool is NaN at first, rows come in a random order, and every step has a number of
        threads of its own (see `team`).
        """
        self.pool.fill_(NAN_IN_8_BITS if self.pool.dtype == torch.uint8 else torch.nan)
        blocks = list(range(BLOCKS))
        generator.shuffle(blocks)
        slots = [
            Slot(SamplingParams(max_tokens=1, seed=0), len(prompt), array("i", prompt), [0], b"")
            for prompt in prompts
        ]
        for slot in slots:
            slot.table.extend(blocks.pop() for _ in range(-(-len(slot.tokens) // BLOCK_SIZE)))
        parts: list[list[Tensor]] = [[] for _ in prompts]
        starts = [0] * len(prompts)
        while going := [i for i, slot in enumerate(slots) if starts[i] < len(slot.tokens)]:
            generator.shuffle(going)
            torch.set_num_threads(generator.randint(1, 2))
            rows = [
                Row(i, slots[i], starts[i], slots[i].tokens[starts[i] : starts[i] + chunk()], 0)
                for i in going
            ]
            hidden = self.decoder.hidden(Batch.of(rows, BLOCK_SIZE, CPU), self.pool)
            total = sum(len(row.tokens) for row in rows)
            logits = self.decoder.logits(hidden, torch.arange(total))
            pieces = torch.split(logits, [len(row.tokens) for row in rows])
            for row, part in zip(rows, pieces, strict=True):
                starts[row.number] = row.end
                parts[row.number].append(part)
        return [torch.cat(each) for each in parts]


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def random_prompts(generator: random.Random, count: int) -> list[list[int]]:
    lengths = [generator.randint(1, LONGEST) for _ in range(count)]
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", [*VARIANTS, *COUSINS, *MIXTURES, *LATENTS])
def test_logits_are_transformers(
    name: str, small_model: Prepared, prepared_model: Prepared, generator: random.Random
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(small_model(name), dtype=torch.float32)
    model = Model(prepared_model(name))
    prompts, expected = [], []
    while len(prompts) < 5:
        (prompt,) = random_prompts(generator, 1)
        with torch.inference_mode(), ExpertMargins() as experts:
            logits = oracle(torch.tensor([prompt])).logits[0]
        if experts.clear:
            prompts.append(prompt)
            expected.append(logits)
    found = model.logits(prompts, lambda: generator.randint(1, 40), generator)
    for logits, right in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("within", [True, False])
def test_longrope_is_transformers(within: bool, tmp_path: Path, generator: random.Random) -> None:
    """Where sequences stay within the trained context, and behind it where they may exceed it."""
    trained = 60
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [generator.uniform(1.0, 1.2) for _ in range(6)],
        "long_factor": [generator.uniform(1.5, 4.0) for _ in range(6)],
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": trained}
    folder = make_model("phi3", tmp_path / "model", **changes)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    longest = trained if within else LONGEST
    lengths = [generator.randint(1 if within else trained + 1, longest) for _ in range(4)]
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    model = Model(prepare(str(folder), tmp_path), longest=longest)
    assert model.decoder.config.stretched != within
    found = model.logits(prompts, lambda: generator.randint(1, 40), generator)
    for prompt, logits in zip(prompts, found, strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_latents_of_a_checkpoint_in_blocks_of_8_bits(
    tmp_path: Path, generator: random.Random
) -> None:
    """As DeepSeek-V3 is published: what makes keys and values of latents, too."""
    sizes = {"kv_lora_rank": 176, "q_lora_rank": 192}
    source = make_model("deepseek-v3", tmp_path / "source", **sizes)
    twin = write_checkpoint(source, tmp_path / "model", CHECKPOINTS["fp8"])
    prompts = random_prompts(generator, 3)
    found, expected = (
        Model(prepare(str(folder), tmp_path)).logits(prompts, lambda: 30, generator)
        for folder in (tmp_path / "model", twin)
    )
    for logits, same in zip(found, expected, strict=True):
        assert torch.equal(logits, same)


@QUANTIZATIONS
@of_types(
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3-partial", "qwen3-moe", "gpt-oss"),
    "deepseek-v3",
)
def test_bits_do_not_depend_on_the_batch(
    name: str,
    dtype: torch.dtype,
    matrices: Quantization,
    prepared_model: Prepared,
    generator: random.Random,
) -> None:
    model = Model(prepared_model(name), dtype, matrices)
    prompts = random_prompts(generator, 6)
    alone = [model.logits([prompt], lambda: LONGEST, generator)[0] for prompt in prompts]
    assert all(logits.isfinite().all() for logits in alone)
    for chunk in (lambda: 1, lambda: LONGEST, lambda: generator.randint(1, 40)):
        for together, expected in zip(model.logits(prompts, chunk, generator), alone, strict=True):
            assert torch.equal(together, expected)


@QUANTIZATIONS
@of_types(
    *("llama-biases", "mistral", "qwen3", "gemma3", "olmo3", "granite", "qwen3-moe", "gpt-oss"),
    *("exaone4", "glm4-moe"),
)
@torch.inference_mode()
def test_all_layers_at_once_are_the_layers_one_by_one(
    name: str,
    dtype: torch.dtype,
    matrices: Quantization,
    prepared_model: Prepared,
    generator: random.Random,
) -> None:
    model = Model(prepared_model(name), dtype, matrices)
    prompts = random_prompts(generator, 4)
    at_once = model.logits(prompts, lambda: generator.randint(1, 40), generator)
    by_layer = model.decoder.hidden_by_layer
    with patch.object(model.decoder, "hidden", by_layer):
        alone = model.logits(prompts, lambda: LONGEST, generator)
    for logits, expected in zip(at_once, alone, strict=True):
        assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        pytest.param("qwen3", torch.float32, marks=pytest.mark.slow),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.inference_mode()
def test_keys_and_values_of_8_bits(
    name: str, dtype: torch.dtype, prepared_model: Prepared, generator: random.Random
) -> None:
    """All that the two tests before this promise; and that logits stay near."""
    model = Model(prepared_model(name), dtype, eight_bits=True)
    prompts = random_prompts(generator, 4)
    alone = [model.logits([prompt], lambda: LONGEST, generator)[0] for prompt in prompts]
    for chunk in (lambda: 1, lambda: generator.randint(1, 40)):
        for together, expected in zip(model.logits(prompts, chunk, generator), alone, strict=True):
            assert torch.equal(together, expected)
    with patch.object(model.decoder, "hidden", model.decoder.hidden_by_layer):
        by_layer = model.logits(prompts, lambda: generator.randint(1, 40), generator)
    wide = Model(prepared_model(name), dtype).logits(prompts, lambda: LONGEST, generator)
    for logits, expected, exact in zip(by_layer, alone, wide, strict=True):
        assert torch.equal(logits, expected)
        apart = (logits.log_softmax(-1) - exact.log_softmax(-1)).abs()
        assert 0 < apart.mean() < 0.1


def test_every_layer_is_progress(prepared_model: Prepared, generator: random.Random) -> None:
    model = Model(prepared_model("llama"))
    model.logits([[1, 2, 3]], lambda: 1, generator)
    assert model.layers == 3 * 3


def test_a_pool_without_whole_panels_is_refused(
    prepared_model: Prepared, generator: random.Random
) -> None:
    model = Model(prepared_model("llama"))
    model.pool = model.pool[:, :, :, :, : BLOCK_SIZE // 2]
    with pytest.raises(ValueError, match="multiple of 16 tokens"):
        model.logits([[1, 2, 3]], lambda: 1, generator)
