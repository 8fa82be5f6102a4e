"""A cell serves a checkpoint as a quantizing tool saved it: it says what transformers' model of the
same weights would.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagefleet_worker.prepare import default_cache
from tests.checkpoints import CHECKPOINTS, round_activations, write_checkpoint
from tests.models import VOCAB_SIZE, make_model
from tests.system.serving import Serving, pagefleet_serve
from tests.unit.worker.test_quantized_engine import DRIFT

KINDS = {
    "gptq": ["gptq of 32, asymmetric"],
    "awq": ["awq", "awq of 32"],
    "compressed-tensors": ["packed", "packed of 32, asymmetric", "packed in 8 bits", "int8"],
}
"""Some checkpoints of each `quant_method`."""


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A folder with a quantized model, and one with the same weights in float32."""
    name = random.choice(KINDS[request.param])
    print("checkpoint:", name)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    source = make_model("llama", tmp_path / "source", **sizes)
    return tmp_path / "model", write_checkpoint(source, tmp_path / "model", CHECKPOINTS[name])


@pytest.fixture
def serving(checkpoint: tuple[Path, Path], tmp_path: Path) -> Iterator[Serving]:
    """Prepares the model in a cache of its own, with the compiled kernels of the user's."""
    (own := tmp_path / "cache" / "pagefleet").mkdir(parents=True)
    (kernels := default_cache() / "kernels").mkdir(parents=True, exist_ok=True)
    (own / "kernels").symlink_to(kernels)
    options = [f"--model={checkpoint[0]}", "--device=cpu", "--dtype=float32", "--num-blocks=60"]
    with pagefleet_serve(tmp_path, *options, XDG_CACHE_HOME=str(own.parent)) as serving:
        yield serving


@pytest.mark.slow
@torch.inference_mode()
def test_a_quantized_checkpoint_is_served_as_it_is(
    checkpoint: tuple[Path, Path], serving: Serving
) -> None:
    prompts = [random.choices(range(VOCAB_SIZE), k=random.randint(1, 40)) for _ in range(6)]
    body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{serving.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60
    ).json()
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint[1], dtype=torch.float32)
    round_activations(oracle)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        tokens = torch.tensor(choice["token_ids"])
        logits = oracle(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        chosen = expected.gather(1, tokens[:, None])[:, 0]
        assert (expected.amax(-1) - chosen <= DRIFT).all()
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen.tolist(), abs=DRIFT)
