"""Models as quantizing tools save them, packed here by the definitions of their formats.

`write_checkpoint` rounds the linear layers of a folder in Hugging Face's layout. What the numbers
stand for is kept beside, as a model that transformers can load.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagefleet_kernels.quantized import GROUP, Kind, round_rows

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by their last names, and the weights that they stand for, float32."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of numbers along the last dimension; the first in `order` is lowest."""
    per_word = 32 // bits
    each = numbers.to(torch.int64).reshape(*numbers.shape[:-1], -1, per_word)
    total = torch.zeros(each.shape[:-1], dtype=torch.int64)
    for place, index in enumerate(order or range(per_word)):
        total |= each[..., index] << (bits * place)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


@dataclass(frozen=True)
class Rounded:
    """numbers [outputs, inputs] below 2 ** bits; scales, zeros [outputs, groups]; the group of each
    input.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        scales, zeros = self.scales.double(), self.zeros.double()
        weight = (self.numbers.double() - zeros[:, self.groups]) * scales[:, self.groups]
        return weight.float()


def rounded(
    weight: Tensor,
    bits: int,
    size: int,
    *,
    symmetric: bool,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Rounded:
    """Groups of `size` inputs, -1 for all; `shuffled` ones lie anywhere."""
    outputs, inputs = weight.shape
    size = inputs if size == -1 else size
    groups = torch.arange(inputs) // size
    if shuffled:
        groups = groups[torch.randperm(inputs)]
    members = weight[:, groups.argsort(stable=True)].view(outputs, -1, size)
    low, high = members.amin(-1).clamp(max=0), members.amax(-1).clamp(min=0)
    if symmetric:
        scales = (2 * torch.maximum(-low, high) / (2**bits - 1)).to(dtype)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((high - low) / (2**bits - 1)).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    spread, centres = scales.float()[:, groups], zeros.float()[:, groups]
    numbers = (weight / spread + centres).round().clamp(0, 2**bits - 1)
    return Rounded(numbers.to(torch.int64), scales, zeros.to(torch.int64), groups)


def gptq(weight: Tensor, bits: int, size: int, *, v2: bool = False, **options: Any) -> Packed:
    made = rounded(weight, bits, size, **options)
    stored = made.zeros if v2 else (made.zeros - 1) % 2**bits
    tensors = {
        "qweight": words(made.numbers, bits).T,
        "qzeros": words(stored.T, bits),
        "scales": made.scales.T,
        "g_idx": made.groups.int(),
    }
    return tensors, made.weight


def awq(weight: Tensor, size: int, *, symmetric: bool = False) -> Packed:
    made = rounded(weight, 4, size, symmetric=symmetric)
    tensors = {
        "qweight": words(made.numbers.T, 4, AWQ_ORDER),
        "qzeros": words(made.zeros.T, 4, AWQ_ORDER),
        "scales": made.scales.T,
    }
    return tensors, made.weight


def packed(weight: Tensor, bits: int, size: int, **options: Any) -> Packed:
    """`pack-quantized` of compressed-tensors."""
    made = rounded(weight, bits, size, dtype=torch.bfloat16, **options)
    tensors = {
        "weight_packed": words(made.numbers, bits),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not options["symmetric"]:
        tensors["weight_zero_point"] = words(made.zeros.T, bits).T
    if options.get("shuffled"):
        tensors["weight_g_idx"] = made.groups.int()
    elif size == 128:
        tensors["weight_g_idx"] = torch.full((weight.shape[1],), -1)  # as some leave it unset
    return tensors, made.weight


def int8(weight: Tensor, size: int, *, symmetric: bool, whole: bool = False) -> Packed:
    """`int-quantized` of compressed-tensors; `whole`: one scale for all."""
    values = weight.flatten().unsqueeze(0) if whole else weight
    made = rounded(values, 8, size, symmetric=symmetric, dtype=torch.bfloat16)
    tensors = {
        "weight": (made.numbers - 128).to(torch.int8).view(weight.shape),
        "weight_scale": made.scales.flatten() if whole else made.scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = (made.zeros - 128).to(torch.int8)
    return tensors, made.weight.view(weight.shape)


def float8(weight: Tensor, block: tuple[int, int], scale: str, shape: str = "") -> Packed:
    """A scale for each `block`, -1 for all outputs or inputs."""
    outputs, inputs = weight.shape
    height, width = (
        (outputs if block[0] == -1 else block[0]),
        (inputs if block[1] == -1 else block[1]),
    )
    rows, columns = torch.arange(outputs) // height, torch.arange(inputs) // width
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            scales[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
    spread = scales[rows][:, columns]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    kept = scales.flatten() if shape == "flat" else scales
    return {"weight": numbers, scale: kept}, (numbers.double() * spread.double()).float()


@dataclass(frozen=True)
class Checkpoint:
    """A way to quantize. kept: how kernels take matrices as they are; None: widened.
    exact: whether they stand for the same weights then.
    """

    config: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    kept: Kind | None = Kind.INT4
    exact: bool = True


def _is_held(bits: int, size: int, *, symmetric: bool, shuffled: bool = False, **_: Any) -> bool:
    """Whether the kernels have a form for such groups."""
    return (size == -1 or size % GROUP == 0) and not shuffled and (bits == 4 or symmetric)


def _kind(bits: int) -> Kind:
    return Kind.INT8 if bits == 8 else Kind.INT4


def _gptq(bits: int, size: int, **options: Any) -> Checkpoint:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size}
    config |= {"sym": options["symmetric"], "desc_act": options.get("shuffled", False)}
    if options.get("v2"):
        config["checkpoint_format"] = "gptq_v2"
    kept = _kind(bits) if _is_held(bits, size, **options) else None
    return Checkpoint(config, lambda w: gptq(w, bits, size, **options), kept, options["symmetric"])


def _awq(size: int, **options: Any) -> Checkpoint:
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return Checkpoint(config, lambda w: awq(w, size, **options), exact=False)


def _compressed(layout: str, pack: Callable[[Tensor], Packed], **kept: Any) -> Checkpoint:
    numbers: dict[str, Any] = {"num_bits": kept.pop("bits", 8), "type": kept.pop("type", "int")}
    numbers |= {"strategy": "group", "block_structure": kept.pop("block", None)}
    groups = {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    return Checkpoint(config | {"ignore": ["lm_head"]}, pack, **kept)


def _packed(bits: int, size: int, **options: Any) -> Checkpoint:
    return _compressed(
        "pack-quantized",
        lambda w: packed(w, bits, size, **options),
        bits=bits,
        kept=_kind(bits) if _is_held(bits, size, **options) else None,
        exact=options["symmetric"],
    )


def _float8(block: tuple[int, int], scale: str, shape: str = "", **config: Any) -> Checkpoint:
    return Checkpoint(config, lambda w: float8(w, block, scale, shape), Kind.E4M3)


CHECKPOINTS = {
    "gptq": _gptq(4, 128, symmetric=True),
    "gptq of 32": _gptq(4, 32, symmetric=True),
    "gptq of 32, asymmetric": _gptq(4, 32, symmetric=False),
    "gptq of 64, asymmetric, v2": _gptq(4, 64, symmetric=False, v2=True),
    "gptq, whole rows": _gptq(4, -1, symmetric=True),
    "gptq in 8 bits": _gptq(8, 128, symmetric=True),
    "gptq in 8 bits, asymmetric": _gptq(8, 32, symmetric=False),
    "gptq of 16": _gptq(4, 16, symmetric=True),
    "gptq, shuffled": _gptq(4, 32, symmetric=True, shuffled=True),
    "awq": _awq(128),
    "awq of 32": _awq(32),
    "packed": _packed(4, 128, symmetric=True),
    "packed of 32, asymmetric": _packed(4, 32, symmetric=False),
    "packed, whole rows, asymmetric": _packed(4, -1, symmetric=False),
    "packed in 8 bits": _packed(8, -1, symmetric=True),
    "packed, shuffled": _packed(4, 64, symmetric=True, shuffled=True),
    "int8": _compressed("int-quantized", lambda w: int8(w, -1, symmetric=True), kept=Kind.INT8),
    "int8 of 32": _compressed(
        "naive-quantized", lambda w: int8(w, 32, symmetric=True), kept=Kind.INT8
    ),
    "int8, asymmetric": _compressed(
        "int-quantized", lambda w: int8(w, -1, symmetric=False), kept=None
    ),
    "int8, whole": _compressed(
        "int-quantized", lambda w: int8(w, -1, symmetric=True, whole=True), kept=Kind.INT8
    ),
    "float8, rows": _compressed(
        "float-quantized",
        lambda w: float8(w, (1, -1), "weight_scale"),
        type="float",
        kept=Kind.E4M3,
    ),
    "float8, whole": _compressed(
        "naive-quantized",
        lambda w: float8(w, (-1, -1), "weight_scale", "flat"),
        type="float",
        kept=Kind.E4M3,
    ),
    "float8, blocks": _compressed(
        "float-quantized",
        lambda w: float8(w, (64, 96), "weight_scale"),
        type="float",
        block=[64, 96],
        kept=None,
    ),
    "fp8": _float8(
        (128, 128), "weight_scale_inv", quant_method="fp8", weight_block_size=[128, 128]
    ),
    "fp8, whole": _float8(
        (-1, -1), "weight_scale", "flat", quant_method="fp8", activation_scheme="static"
    ),
    "fbgemm": _float8((1, -1), "weight_scale", quant_method="fbgemm_fp8"),
}
"""By what they are called in tests. Where groups have 128 inputs, so must a
multiple of them have the matrices of the model."""


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks and the scales of [experts, outputs, inputs]."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(-1, (-1, GROUP))
    exponents = (groups.abs().amax(-1) / 6).clamp(min=2**-20).log2().ceil()
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)
    codes = torch.where(scaled < 0, codes + 8, codes).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def write_mxfp4(source: Path, target: Path) -> Path:
    """The model of gpt-oss' kind in `source`, with its experts in MXFP4, in `target`. See
    `write_checkpoint`; what the numbers stand for is what transformers makes of them.
    """
    twin = target.with_name(f"{target.name}-widened")
    for folder in (target, twin):
        shutil.copytree(source, folder)
    state = load_file(source / "model.safetensors")
    meant, stored = dict(state), dict(state)
    for name, weight in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del stored[name]
            weight[0, :GROUP, :4] = 0  # groups whose scales say nothing
            blocks, scales = mxfp4(weight.mT.contiguous())
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": modules,
    }
    (target / "config.json").write_text(json.dumps(config))
    return twin


def write_checkpoint(
    source: Path, target: Path, checkpoint: Checkpoint, *, head: bool = False
) -> Path:
    """The model in `source`, with its linear layers quantized, in `target`; its `head` if that is
    asked for, and not the value projection of layer 1, as tools leave out what they are told to.

    Returns:
        A folder beside `target` with a model in float32 that has the same weights.
    """
    twin = target.with_name(f"{target.name}-widened")
    for folder in (target, twin):
        shutil.copytree(source, folder)
    state = load_file(source / "model.safetensors")
    meant, stored = dict(state), dict(state)
    for name, weight in state.items():
        linear = name.endswith("_proj.weight") or (head and name == "lm_head.weight")
        if linear and "layers.1.self_attn.v_proj" not in name:
            weight[0].abs_()  # so that some zero points are 0
            tensors, meant[name] = checkpoint.pack(weight.float())
            module = name.removesuffix(".weight")
            del stored[name]
            stored |= {f"{module}.{last}": each.contiguous() for last, each in tensors.items()}
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = checkpoint.config
    (target / "config.json").write_text(json.dumps(config))
    return twin


def round_activations(twin: torch.nn.Module) -> None:
    """Let the model beside one of `write_checkpoint` compute as a CPU does that keeps the numbers:
    the layers that have few bits take their inputs in eight. Projections of layer 1 are not among
    them where they are fused with one that was left out.
    """
    kept = re.compile(r"_proj$(?<!layers\.1\.self_attn\.[qkv]_proj)")

    def rounded_inputs(_: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return round_rows(inputs[0].flatten(0, -2)).view(inputs[0].shape)

    for name, module in twin.named_modules():
        if kept.search(name):
            module.register_forward_pre_hook(rounded_inputs)
