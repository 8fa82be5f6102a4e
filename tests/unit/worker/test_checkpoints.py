"""Quantized checkpoints are read as what they stand for, and what is unknown is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagefleet.manifest import Weights
from pagefleet_kernels.quantized import Kind, Quantized
from pagefleet_worker.checkpoints.formats import format_of
from pagefleet_worker.checkpoints.safetensors_files import TensorFiles
from pagefleet_worker.checkpoints.stored_matrix import Grouped
from pagefleet_worker.model.config import parse_config
from pagefleet_worker.model.shares import Share
from pagefleet_worker.model.weights import (
    INT8,
    OWN,
    PLAIN,
    DecoderWeights,
    LayerWeights,
    Quantization,
    load_weights,
)
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.prepare import prepare
from tests.checkpoints import CHECKPOINTS, write_checkpoint
from tests.models import make_model

CPU = torch.device("cpu")
MATRICES = ("qkv", "output", "gate_up", "down")
BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    return make_model("llama", tmp_path_factory.mktemp("source"), **sizes, **BIASED)


def load(
    folder: Path,
    quantization: Quantization,
    dtype: torch.dtype = torch.float32,
    share: Share | None = None,
) -> tuple[DecoderWeights, list[LayerWeights]]:
    config = parse_config(json.loads((folder / "config.json").read_text()))
    files = Weights("safetensors", (str(folder / "model.safetensors"),))
    options = {} if share is None else {"share": share}
    weights = load_weights(files, config, dtype, CPU, lambda *_: None, quantization, **options)
    return weights, list(weights.layers)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_what_it_stands_for(name: str, source: Path, tmp_path: Path) -> None:
    checkpoint = CHECKPOINTS[name]
    twin = write_checkpoint(source, tmp_path / "model", checkpoint)
    expected, meant = load(twin, PLAIN)
    widened, plain = load(tmp_path / "model", PLAIN)
    weights, own = load(tmp_path / "model", OWN)
    assert weights.kinds == ({checkpoint.kept} if checkpoint.kept else set())
    assert torch.equal(widened.head, expected.head)
    assert torch.equal(weights.head, expected.head)
    for number, (layer, same, right) in enumerate(zip(own, plain, meant, strict=True)):
        assert torch.equal(same.qkv_bias, right.qkv_bias)
        for field in MATRICES:
            found, matrix, weight = (getattr(each, field) for each in (layer, same, right))
            assert torch.equal(matrix, weight)
            if checkpoint.kept is None or (number == 1 and field == "qkv"):
                assert torch.equal(found, weight)
                continue
            assert isinstance(found, Quantized)
            assert found.kind is checkpoint.kept
            off = (found.dequantized() - weight).abs()
            steps = found.scales.float().repeat_interleave(found.group, dim=1)
            assert (off <= steps * (0 if checkpoint.exact else 15 * 2**-11)).all()


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "packed, shuffled"])
def test_all_is_in_eight_bits_where_that_is_asked_for(
    name: str, source: Path, tmp_path: Path
) -> None:
    twin = write_checkpoint(source, tmp_path / "model", CHECKPOINTS[name])
    expected, meant = load(twin, PLAIN)
    weights, layers = load(tmp_path / "model", INT8)
    assert weights.kinds == {Kind.INT8}
    pairs = [(weights.head, expected.head)]
    for layer, right in zip(layers, meant, strict=True):
        pairs += [(getattr(layer, field), getattr(right, field)) for field in MATRICES]
    for matrix, weight in pairs:
        assert isinstance(matrix, Quantized)
        assert (matrix.dequantized() - weight).abs().max() <= weight.abs().max() / 250


@pytest.mark.parametrize("quantization", [PLAIN, OWN])
@pytest.mark.parametrize("name", ["gptq of 32, asymmetric", "int8", "fp8"])
def test_ranks_have_shares_of_it(
    name: str, quantization: Quantization, source: Path, tmp_path: Path
) -> None:
    write_checkpoint(source, tmp_path / "model", CHECKPOINTS[name])
    _, whole = load(tmp_path / "model", quantization)
    _, first = load(tmp_path / "model", quantization, share=Share(0, 2))
    _, second = load(tmp_path / "model", quantization, share=Share(1, 2))
    for layer, *shares in zip(whole, first, second, strict=True):
        down = torch.cat([plain(each.down) for each in shares], dim=1)
        assert torch.equal(down, plain(layer.down))
        halves = [plain(each.gate_up).chunk(2) for each in shares]
        gate_up = torch.cat([part for pair in zip(*halves, strict=True) for part in pair])
        assert torch.equal(gate_up, plain(layer.gate_up))


def test_shares_that_cut_groups_or_end_in_padding_are_widened(tmp_path: Path) -> None:
    """48 of 96 neurons, and 137 of 273 words, the last of which is none."""
    source = make_model("llama", tmp_path / "source", vocab_size=273)
    write_checkpoint(source, tmp_path / "model", CHECKPOINTS["int8 of 32"], head=True)
    whole, _ = load(tmp_path / "model", OWN)
    first, layers = load(tmp_path / "model", OWN, share=Share(0, 2))
    last, _ = load(tmp_path / "model", OWN, share=Share(1, 2))
    assert isinstance(layers[0].down, Tensor)
    assert isinstance(layers[0].output, Quantized)
    assert isinstance(first.head, Quantized)
    assert isinstance(last.head, Tensor)
    head = torch.cat([plain(first.head), last.head])
    assert torch.equal(head[:273], plain(whole.head))
    assert not head[273:].any()


def plain(matrix: Tensor | Quantized) -> Tensor:
    return matrix.dequantized() if isinstance(matrix, Quantized) else matrix


def test_scales_that_float16_cannot_hold_are_widened(source: Path, tmp_path: Path) -> None:
    write_checkpoint(source, tmp_path / "model", CHECKPOINTS["packed"])
    for factor in (2.0**-20, 2.0**20):
        tensors = load_file(tmp_path / "model" / "model.safetensors")
        name = "model.layers.0.mlp.down_proj.weight_scale"
        tensors[name] *= factor
        save_file(tensors, tmp_path / "model" / "model.safetensors")
        _, layers = load(tmp_path / "model", OWN)
        assert isinstance(layers[0].down, Tensor)
        assert layers[0].down.isfinite().all()
        tensors[name] /= factor
        save_file(tensors, tmp_path / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("awq", {"quant_method": "awq", "bits": 4, "group_size": 16}),
        ("gptq", {"quant_method": "gptq", "bits": 4}),
        ("compressed", CHECKPOINTS["packed"].config),
    ],
)
def test_what_the_tools_wrote(module: str, config: dict[str, Any]) -> None:
    """AutoAWQ 0.2.9, AutoGPTQ 0.7.1 and compressed-tensors 0.20.1 packed the same numbers."""
    outputs, inputs = torch.arange(32).unsqueeze(1), torch.arange(32)
    groups = 2 * outputs + torch.arange(2)
    tensors = TensorFiles([str(Path(__file__).with_name("tools.safetensors"))])
    layout = format_of({"quantization_config": config})
    assert layout is not None
    matrix = layout.matrix(tensors, f"model.{module}", (32, 32))
    assert isinstance(matrix, Grouped)
    assert torch.equal(matrix.numbers.long(), (227 * outputs + 7 * inputs) % 16)
    assert torch.equal(matrix.zeros.long(), groups * 5 % 15 + 1)
    assert torch.equal(matrix.scales.float(), 2.0 ** -(1.0 + groups % 3))


DOWN = "model.layers.1.mlp.down_proj"


def drop(last: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(f"{DOWN}.{last}")


def put(last: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    def put_there(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.{last}"] = change(tensors[f"{DOWN}.{last}"])

    return put_there


MALFORMED: list[tuple[str, Callable[[dict[str, Tensor]], Any], str]] = [
    ("gptq", drop("qzeros"), f"lack the tensor '{DOWN}.qzeros'"),
    ("gptq", drop("qweight"), f"lack the tensor '{DOWN}.weight'"),
    ("gptq", put("qweight", lambda t: t[:-1]), r"shape \[47, 128\], but .* \[48, 128\]"),
    ("gptq", put("qweight", lambda t: t[:36]), "to 3 bits, which is not supported"),
    ("gptq", put("qweight", lambda t: t.float()), r"is torch.float32, and .* torch.int32"),
    ("gptq", put("scales", lambda t: t[:, 1:]), r"scales' has the shape \[3, 127\]"),
    ("gptq", put("scales", lambda t: t[0]), r"scales' has the shape \[128\]"),
    ("gptq", put("g_idx", lambda t: t + 1), "g_idx' names groups beyond the 3"),
    ("gptq", put("g_idx", lambda t: t - 2), "g_idx' names groups beyond the 3"),
    ("awq", put("qweight", lambda t: t[1:]), r"qweight' has the shape \[383, 16\]"),
    ("awq", put("qzeros", lambda t: t[1:]), r"qzeros' has the shape \[2, 16\]"),
    ("awq", put("scales", lambda t: t.int()), "scales' is torch.int32"),
    ("packed", drop("weight_scale"), "lack the tensor .*weight_scale"),
    ("packed", put("weight_packed", lambda t: t[:, 1:]), r"shape \[128, 47\], but .* 48\]"),
    ("packed", put("weight_scale", lambda t: t[:, :0]), r"shape \[128, 0\]: no scales of"),
    ("packed", put("weight_scale", lambda t: t[1:]), r"shape \[127, 3\]: no scales of"),
    ("packed, shuffled", put("weight_g_idx", lambda t: t + 9), "names groups beyond the 6"),
    (
        "packed of 32, asymmetric",
        put("weight_zero_point", lambda t: t[1:]),
        r"weight_zero_point' has the shape \[15, 12\]",
    ),
    ("int8", drop("weight_scale"), "is torch.int8"),
    ("int8", put("weight", lambda t: t[1:]), r"weight' has the shape \[127, 384\]"),
    ("fp8", drop("weight_scale_inv"), "is torch.float8_e4m3fn"),
    ("fp8", put("weight_scale_inv", lambda t: t[:, 1:]), r"\[128, 384\] in blocks of \[128, 128\]"),
    ("fp8", put("weight", lambda t: t.float().to(torch.float8_e5m2)), "is torch.float8_e5m2"),
    ("fbgemm", put("weight_scale", lambda t: t[1:]), r"\[127, 1\]: no scales of a matrix"),
]


def test_a_file_that_was_cut_short(source: Path, tmp_path: Path) -> None:
    """Refused when it is prepared, if it is looked into then, and when it is loaded."""
    write_checkpoint(source, tmp_path / "model", CHECKPOINTS["gptq"])
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for read in (lambda: prepare(str(file.parent), tmp_path), lambda: TensorFiles([str(file)])):
        with pytest.raises(ModelError, match="is no safetensors file"):
            read()


@pytest.mark.parametrize(("name", "change", "complaint"), MALFORMED)
def test_malformed_tensors_are_refused(
    name: str,
    change: Callable[[dict[str, Tensor]], Any],
    complaint: str,
    source: Path,
    tmp_path: Path,
) -> None:
    write_checkpoint(source, tmp_path / "model", CHECKPOINTS[name])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    change(tensors)
    whole = {name: each.contiguous() for name, each in tensors.items()}
    save_file(whole, tmp_path / "model" / "model.safetensors")
    for quantization in (PLAIN, OWN):
        with pytest.raises(ModelError, match=complaint):
            load(tmp_path / "model", quantization)


def compressed(**changes: Any) -> dict[str, Any]:
    return CHECKPOINTS["packed"].config | changes


def scheme(**numbers: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}}}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes', which is not supported"),
        ({"quant_method": ["gptq"]}, "which is not supported"),
        ({"bits": 4}, "quantized by None"),
        ("awq", "malformed: 'awq'"),
        ({"quant_method": "gptq"}, "quantization_config is malformed: .*`bits`"),
        ({"quant_method": "gptq", "bits": 3}, "by GPTQ to 3 bits, which is not supported; 4 and 8"),
        ({"quant_method": "gptq", "bits": "4"}, "malformed"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "by GPTQ in the layout 'marlin'",
        ),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "in words of int16"),
        ({"quant_method": "awq", "bits": 8}, "by AWQ to 8 bits, which is not supported; 4 are"),
        ({"quant_method": "awq", "w_bit": 4, "version": "GEMV"}, "in the layout 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "malformed"),
        (compressed(format="marlin-24"), "stored as 'marlin-24' of compressed-tensors"),
        (compressed(format="nvfp4-pack-quantized"), "stored as 'nvfp4-pack-quantized'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "as 'sparse-24-bitmask'"),
        (compressed(transform_config={"config_groups": {"v": {}}}), "are to be transformed"),
        (compressed(**scheme(num_bits=2, type="int")), "to 2 bits, which is not supported"),
        (compressed(**scheme(num_bits=4, type="float")), r"\(float\) to 4 bits"),
    ],
)
def test_what_is_unknown_is_refused(config: Any, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        format_of({"quantization_config": config})
