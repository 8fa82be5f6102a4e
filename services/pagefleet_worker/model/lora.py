"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

An adapter changes a matrix W to W + scale * B A (Hu et al., "LoRA", 2021, section 4.1). Which
matrices it changes is what the file holds; the config says by which scale: alpha / r, or alpha /
sqrt(r) (Kalajdzievski, "A rank stabilization scaling factor", 2023), with patterns that give some
modules another r or alpha. What asks for more than that is refused: an adapter that runs almost
right is worse than one that does not start.

Ranks that share a model (`shares`) share an adapter as they do its matrices. Where a rank has some
of the outputs, it has their rows of B, and the whole of A; where it has some of the inputs, their
columns of A, and the whole of B. What it adds is then a summand, B (A x) in parts, and goes the way
of the layer's own.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import msgspec
import regex
import torch
from torch import Tensor

from pagefleet.manifest import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from pagefleet_kernels.lora import Factors
from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model.shares import WHOLE, Share
from pagefleet_worker.model_files import ModelError, open_safetensors, read_json

LayerFactors: TypeAlias = dict[str, tuple[Factors, ...]]
"""What an adapter adds to each matrix of one layer, by the names of `DecoderConfig.modules`."""

_NAME = re.compile(
    r"base_model\.model\.(?:model\.)?layers\.(0|[1-9][0-9]{0,5})\.(.+)\.lora_(A|B)\.weight"
)
_READABLE = ("F32", "F16", "BF16")
_PATTERN_SECONDS = 1.0
"""That a module may take to be compared with a pattern: some would take years."""
_LARGEST = torch.finfo(torch.float32).max

_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Fields that change what an adapter computes; they must be false or empty."""

_PLAIN_BEGINNINGS = ("gaussian", "orthogonal", "eva")
"""Ways to begin a training that leave the base model as it is."""


@dataclass(frozen=True)
class LoraModule:
    """One changed matrix: the names of its two tensors, and its scale."""

    down: str
    up: str
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """A checked adapter, whose tensors are still in its file.

    modules: by layer and name, for example (0, "self_attn.q_proj").
    """

    tensors: Path
    modules: dict[tuple[int, str], LoraModule]

    def layers(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        share: Share = WHOLE,
    ) -> Iterator[LayerFactors]:
        """Read a rank's share of the tensors, layer by layer; `config` is that of the whole model.

        Raises:
            ModelError: one holds what is no number, or none in `dtype`.
        """
        modules, own = share.modules(config), share.of(config)
        with open_safetensors(self.tensors, "pt") as file:

            def read(name: str, rows: Sequence[slice], columns: slice) -> Tensor:
                tensor: Tensor = file.get_tensor(name).to(device, dtype)
                if not tensor.isfinite().all():
                    raise ModelError(
                        f"The tensor {name!r} in {self.tensors} holds NaN, or what {dtype} cannot "
                        "hold: its training failed, or the file is damaged."
                    )
                return torch.cat([tensor[each, columns] for each in rows])

            def factors(layer: int, field: str, order: Tensor | None) -> Iterator[Factors]:
                first = 0
                for part in modules[field]:
                    outputs = sum(cut.count for cut in part.rows)
                    if (module := self.modules.get((layer, part.name))) is not None:
                        down = read(module.down, [slice(None)], part.columns.span)
                        up = read(module.up, [cut.span for cut in part.rows], slice(None))
                        if order is not None:
                            up = up[order[first : first + outputs].to(device) - first]
                        yield Factors(first, down, up, module.scale)
                    first += outputs

            for layer in range(config.layers):
                orders = own.row_orders(layer)
                yield {field: tuple(factors(layer, field, orders.get(field))) for field in modules}


def read_adapter(folder: Path, config: DecoderConfig) -> LoraAdapter:
    """Check the adapter in `folder` against the model that it is for; reads no tensor.

    Raises:
        ModelError: it cannot be served with this model; a sentence says why.
    """
    scales = _read_config(folder)
    path = folder / ADAPTER_WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(
            f"{folder} lacks {ADAPTER_WEIGHTS_FILE}. Save the adapter with save_pretrained: "
            "pickled ones (adapter_model.bin) are never read."
        )
    with open_safetensors(path, "np") as file:
        found = {name: _Header.of(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    try:
        return LoraAdapter(path, _modules(path, found, scales, config))
    except TimeoutError as error:
        raise ModelError(
            f"A pattern of {folder / ADAPTER_CONFIG_FILE} takes too long to be compared with names "
            "of modules. Write the names themselves."
        ) from error


@dataclass(frozen=True)
class _Header:
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> Self:
        return cls(tuple(tensor.get_shape()), tensor.get_dtype())


class _Scales(msgspec.Struct, frozen=True):
    """The numbers of a config."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank(self, module: str) -> int:
        return _first_match(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        alpha = _first_match(self.alpha_pattern or {}, module, self.lora_alpha)
        rank = self.rank(module)
        return alpha / (rank**0.5 if self.use_rslora else rank)


_Number = TypeVar("_Number", int, float)


def _first_match(patterns: dict[str, _Number], module: str, default: _Number) -> _Number:
    """What the first pattern says that is the end of a module's name, a regex, as PEFT reads it.

    Raises:
        TimeoutError: it takes too long.
    """
    for pattern, number in patterns.items():
        if regex.fullmatch(_ending(pattern), module, timeout=_PATTERN_SECONDS):
            return number
    return default


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"


def _read_config(folder: Path) -> _Scales:
    path = folder / ADAPTER_CONFIG_FILE
    values = read_json(path)
    if values is None:
        raise ModelError(
            f"{folder} lacks {ADAPTER_CONFIG_FILE}: it is no adapter in PEFT's format."
        )
    if values.get("peft_type") != "LORA":
        raise ModelError(
            f"{path} describes an adapter of the type {values.get('peft_type')!r}; only LORA is "
            "served. Merge it into the model, and serve that."
        )
    asked = [name for name in _UNSUPPORTED if values.get(name)]
    if values.get("bias", "none") != "none":
        asked.append("bias")
    beginning = values.get("init_lora_weights", True)
    if isinstance(beginning, str) and beginning not in _PLAIN_BEGINNINGS:
        asked.append("init_lora_weights")
    if asked:
        raise ModelError(
            f"{path} asks for {', '.join(f'{name}: {values[name]!r}' for name in asked)}, which is "
            "not served: of LoRA only A and B of linear layers are. Merge the adapter into the "
            "model, and serve that."
        )
    try:
        scales = msgspec.convert(values, _Scales)
        for pattern in [*(scales.rank_pattern or {}), *(scales.alpha_pattern or {})]:
            re.compile(_ending(pattern))
    except (msgspec.ValidationError, re.error) as error:
        raise ModelError(f"{path} is malformed: {error}. Save the adapter again.") from error
    alphas = [scales.lora_alpha, *(scales.alpha_pattern or {}).values()]
    finite = all(abs(alpha) <= _LARGEST for alpha in alphas)
    if min([scales.r, *(scales.rank_pattern or {}).values()]) < 1 or not finite:
        raise ModelError(
            f"{path} is malformed: a rank is at least 1, and alpha is finite. Save the adapter "
            "again."
        )
    return scales


def _modules(
    path: Path, found: dict[str, _Header], scales: _Scales, config: DecoderConfig
) -> dict[tuple[int, str], LoraModule]:
    """What the tensors of a file belong to."""
    names: dict[tuple[int, str], dict[str, str]] = {}
    shapes = module_shapes(config)
    for name, header in found.items():
        layer, part, factor = _place(path, name, config)
        outputs, inputs = shapes[part]
        rank = scales.rank(f"model.layers.{layer}.{part}")
        shape = (rank, inputs) if factor == "A" else (outputs, rank)
        if header.shape != shape or header.dtype not in _READABLE:
            raise ModelError(
                f"The tensor {name!r} in {path} is {header.dtype} {list(header.shape)}, but the "
                f"model and the adapter's config say {list(shape)}, in {' or '.join(_READABLE)}: "
                "the adapter is for another model, or malformed."
            )
        both = names.setdefault((layer, part), {})
        if factor in both:
            raise ModelError(
                f"{path} has both {both[factor]!r} and {name!r}, which stand for one tensor. Save "
                "the adapter again."
            )
        both[factor] = name
    if not names:
        raise ModelError(f"{path} holds no tensor. Save the adapter again.")
    for (layer, part), both in names.items():
        if len(both) != 2:
            raise ModelError(
                f"{path} has only one of lora_A and lora_B of layers.{layer}.{part}. Save the "
                "adapter again."
            )
    return {
        (layer, part): LoraModule(
            both["A"], both["B"], scales.scale(f"model.layers.{layer}.{part}")
        )
        for (layer, part), both in names.items()
    }


def _place(path: Path, name: str, config: DecoderConfig) -> tuple[int, str, str]:
    """Layer, module, and A or B."""
    match = _NAME.fullmatch(name)
    if match is not None and match[2].startswith("mlp.") and _has_experts(config, int(match[1])):
        raise ModelError(
            f"The tensor {name!r} in {path} is not served: it changes experts or their router, and "
            "of a layer that has some LoRA changes the attention only. Train without it, or merge "
            "the adapter into the model, and serve that."
        )
    parts = [part for names in config.modules.values() for part in names]
    if match is None or match[2] not in parts:
        served = ", ".join(part.split(".")[1] for part in parts)
        raise ModelError(
            f"The tensor {name!r} in {path} is not served: of LoRA only A and B of {served} are. "
            "Train without it, or merge the adapter into the model, and serve that."
        )
    if int(match[1]) >= config.layers:
        raise ModelError(
            f"The tensor {name!r} in {path} is of a layer that the model does not have: the last "
            f"of its {config.layers} is {config.layers - 1}. The adapter is for another model."
        )
    return int(match[1]), match[2], match[3]


def _has_experts(config: DecoderConfig, layer: int) -> bool:
    return layer < config.layers and config.experts_of(layer) is not None


def module_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every module that can be changed."""
    return {each.name: each.shape for part in WHOLE.modules(config).values() for each in part}
