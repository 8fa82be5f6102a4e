"""Weights of experts from files of all namings: they are those that transformers saves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet.manifest import Weights
from pagefleet_kernels.quantized import Quantized
from pagefleet_worker.model.config import parse_config
from pagefleet_worker.model.shares import Share
from pagefleet_worker.model.weights import OWN_OR_INT8, LayerWeights, load_weights
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.preparation.gguf_model import gguf_model
from tests.gguf_models import write_gguf
from tests.models import MIXTURES, make_model
from tests.unit.worker.test_weights import CPU, config_of, files_of, load

SmallModel = Callable[[str], Path]

SHARED = {"qwen2-moe": "shared_expert", "glm4-moe": "shared_experts"}
"""What those that have one call it."""


def fields_of(layer: LayerWeights) -> dict[str, Tensor]:
    assert isinstance(layer.gate_up, Tensor)
    assert isinstance(layer.down, Tensor)
    return {name: each for name, each in vars(layer).items() if each is not None}


def in_halves(outputs: Tensor) -> Tensor:
    """[experts, outputs, ...] with gates and values in turns, one behind the other."""
    return torch.cat((outputs[:, ::2], outputs[:, 1::2]), dim=1)


@pytest.fixture(params=MIXTURES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_matrices_of_experts_lie_one_below_the_other(name: str, small_model: SmallModel) -> None:
    folder = small_model(name)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for index, layer in enumerate(load(files_of(folder), config_of(folder)).layers):
        own = f"model.layers.{index}.mlp."
        router = state.get(f"{own}gate.weight", state.get(f"{own}router.weight"))
        if router is None:  # a dense one
            assert layer.router is None
            continue
        routers = [router]
        gate_up, down = (state[f"{own}experts.{kind}_proj"] for kind in ("gate_up", "down"))
        if name == "gpt-oss":
            gate_up, down = in_halves(gate_up.mT), down.mT
            bias = in_halves(state[f"{own}experts.gate_up_proj_bias"])
            assert torch.equal(layer.gate_up_bias, bias.flatten())
            down_bias = state[f"{own}experts.down_proj_bias"]
            assert torch.equal(layer.down_bias, down_bias.flatten())
            assert torch.equal(layer.router_bias, state[f"{own}router.bias"])
        if f"{own}shared_expert_gate.weight" in state:
            routers.append(state[f"{own}shared_expert_gate.weight"])
        if shared := SHARED.get(name):  # one that is as wide as several
            kinds = ("gate", "up", "down")
            gate, up, back = (state[f"{own}{shared}.{kind}_proj.weight"] for kind in kinds)
            pairs = zip(gate.split(down.shape[2]), up.split(down.shape[2]), strict=True)
            gate_up = torch.cat([gate_up, *(torch.cat(pair)[None] for pair in pairs)])
            down = torch.cat([down, *(part[None] for part in back.split(down.shape[2], dim=1))])
        assert torch.equal(layer.router, torch.cat(routers))
        assert torch.equal(layer.gate_up, gate_up.flatten(0, 1))
        assert torch.equal(layer.down, down.flatten(0, 1))


def test_files_with_one_tensor_for_all_experts(
    name: str, small_model: SmallModel, tmp_path: Path
) -> None:
    folder = small_model(name)
    expected = load(files_of(folder), config_of(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = load(files_of(tmp_path), config_of(folder))
    for layer, same in zip(found.layers, expected.layers, strict=True):
        for field, tensor in fields_of(layer).items():
            assert torch.equal(tensor, getattr(same, field))


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("kinds", [["F32"], ["Q8_0"], ["Q4_0"]], ids=str)
def test_gguf(name: str, kinds: list[str], tmp_path: Path) -> None:
    dense = {"mlp_only_layers": []} if name == "qwen3-moe" else {}
    folder = make_model(name, tmp_path / "hf", **dense)
    path = write_gguf(tmp_path / "model.gguf", folder, kinds)
    files, config = Weights("gguf", (str(path),)), config_of(folder)
    assert parse_config(gguf_model(path, "m", own_tokenizer=False).config).experts == config.experts
    plain = load(files, config)
    if kinds == ["F32"]:
        for layer, same in zip(plain.layers, load(files_of(folder), config).layers, strict=True):
            for field, tensor in fields_of(layer).items():
                assert torch.equal(tensor, getattr(same, field))
        return
    quantized = load(files, config, quantization=OWN_OR_INT8)
    for layer, same in zip(plain.layers, quantized.layers, strict=True):
        assert isinstance(same.router, type(layer.router))
        for field in ("gate_up", "down"):
            matrix = getattr(same, field)
            assert isinstance(matrix, Quantized)
            assert torch.equal(matrix.dequantized(), getattr(layer, field))


def test_ranks_have_parts_of_every_expert(name: str, small_model: SmallModel) -> None:
    files, config = files_of(small_model(name)), config_of(small_model(name))
    whole = load(files, config)
    shares = [
        load_weights(files, config, torch.float32, CPU, lambda *at: None, share=Share(rank, 2))
        for rank in range(2)
    ]
    sizes = [Share(0, 2).of(config).experts_of(layer) for layer in range(config.layers)]
    for layer, size, *parts in zip(whole.layers, sizes, *(s.layers for s in shares), strict=True):
        if size is None:
            continue
        count = size.count + size.routing.shared
        gates = [each.gate_up.view(count, 2, size.inner_size, -1) for each in parts]
        assert torch.equal(torch.cat(gates, dim=2).view_as(layer.gate_up), layer.gate_up)
        assert torch.equal(torch.cat([each.down for each in parts], dim=1), layer.down)
        assert all(torch.equal(each.router, layer.router) for each in parts)
        if layer.gate_up_bias is not None:
            biases = [each.gate_up_bias.view(count, 2, size.inner_size) for each in parts]
            assert torch.equal(torch.cat(biases, dim=2).flatten(), layer.gate_up_bias)
            assert [each.down_bias is None for each in parts] == [False, True]


def test_files_that_lack_an_expert(tmp_path: Path, small_model: SmallModel) -> None:
    folder = small_model("mixtral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack the tensor .*\.1\.mlp\.experts\.2\.up_proj"):
        load(files_of(tmp_path), config_of(folder))


@pytest.mark.parametrize(
    "change", [{"num_experts_per_tok": 7}, {"num_experts_per_tok": 0}, {"decoder_sparse_step": 0}]
)
def test_configs_that_no_token_can_obey(change: dict[str, int], small_model: SmallModel) -> None:
    values = AutoModelForCausalLM.from_pretrained(small_model("qwen3-moe")).config.to_dict()
    with pytest.raises(ModelError, match="A token cannot take"):
        parse_config(values | change)


def test_a_shared_expert_that_is_no_multiple_of_others(small_model: SmallModel) -> None:
    values = AutoModelForCausalLM.from_pretrained(small_model("qwen2-moe")).config.to_dict()
    with pytest.raises(ModelError, match=r"A shared expert of 80 .* no multiple of the others' 32"):
        parse_config(values | {"shared_expert_intermediate_size": 80})


def test_every_second_layer_may_be_dense(small_model: SmallModel) -> None:
    values = AutoModelForCausalLM.from_pretrained(small_model("qwen3-moe")).config.to_dict()
    experts = parse_config(values | {"mlp_only_layers": [], "decoder_sparse_step": 2}).experts
    assert [each is None for each in experts] == [True, False, True]
