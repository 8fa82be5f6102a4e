"""From weight files to the decoder's tensors: fused, in the serving dtype, on the device.

A table of what makes each of the decoder's tensors drives the loader (`tensors`). Every target is
made once and filled piece by piece, straight from the memory-mapped file, so that the model is
never held twice. A rank of several keeps its share of each (see `shares`). Pickled weights are
never read.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagefleet.manifest import Weights
from pagefleet_kernels.quantized import Kind, Matrix, Quantized
from pagefleet_worker.checkpoints.safetensors_files import TensorFiles
from pagefleet_worker.checkpoints.stored_matrix import StoredMatrix
from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model.shares import WHOLE, Cut, Share, put_part
from pagefleet_worker.model.tensors import Fused, Norm, Source, layer_tensors, outer_tensors
from pagefleet_worker.model_files import ModelError

_NEVER_QUANTIZED = ("embedding", "router", "kv_up")


@dataclass(frozen=True)
class Quantization:
    """Which matrices are kept in few bits; embeddings, routers and what makes keys and values of
    latents never are.

    own: kinds of numbers that are taken as the files have them.
    others: whether all others are rounded to eight bits.
    """

    own: Set[Kind] = frozenset()
    others: bool = False

    def within(self, kinds: Set[Kind]) -> "Quantization":
        """The same where only these are multiplied as they are."""
        return replace(self, own=self.own & kinds)


PLAIN = Quantization()
INT8 = Quantization(frozenset({Kind.INT8}), others=True)
OWN = Quantization(frozenset(Kind))
OWN_OR_INT8 = Quantization(frozenset(Kind), others=True)

Progress = Callable[[int, int], None]
"""Told how many of how many tensors are loaded."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, matrices as [outputs, inputs]. With a `router` it has experts, whose
    matrices lie one below the other (see `pagefleet_kernels.experts`). With latents `qkv` leads to
    these and to queries, or their latents, which `query_up` makes queries of; `kv_up` makes keys
    and values, head by head (see `layers.LatentLayers`).
    """

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    attention_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    sinks: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None
    correction: Tensor | None = None
    query_up: Matrix | None = None
    kv_up: Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """A whole decoder; `head` is `embedding` itself where the model ties them and it is not
    quantized. `kinds` are those of quantized matrices, of all that was read so far.

    Layers are read when they are taken, once: whoever makes something else of each never holds
    the model twice.
    """

    embedding: Tensor
    layers: Iterable[LayerWeights]
    norm: Tensor
    head: Matrix
    kinds: Set[Kind] = frozenset()


def load_weights(
    files: Weights,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    quantization: Quantization = PLAIN,
    share: Share = WHOLE,
) -> DecoderWeights:
    """Load the weights of a prepared model; taking the layers from what is returned loads them.

    Raises:
        ModelError: the files do not hold what the config says; the layers raise it too.
        ValueError: a matrix cannot be quantized.
    """
    outer = outer_tensors(config, share, own_head=quantization.others)
    inner = [layer_tensors(config, share, layer) for layer in range(config.layers)]
    source = _open(files, config)
    loaded, total = 0, len(outer) + sum(map(len, inner))
    kinds: set[Kind] = set()

    def few_bits(fused: Fused, prefix: str) -> Quantized | None:
        own = fused.quantized(source, prefix, quantization.own) if quantization.own else None
        if own is None and quantization.others and fused.columns is not None:
            return Quantized.of(fused.load(source, prefix, torch.float32, torch.device("cpu")))
        return own

    def load(tensors: dict[str, Fused | Norm], prefix: str) -> dict[str, Any]:
        nonlocal loaded
        made: dict[str, Matrix] = {}
        for field, each in tensors.items():
            matrix = None
            if isinstance(each, Fused) and field not in _NEVER_QUANTIZED:
                matrix = few_bits(each, prefix)
            if matrix is None:
                made[field] = each.load(source, prefix, dtype, device)
            else:
                made[field] = matrix.to(device)
                kinds.add(matrix.kind)
            loaded += 1
            progress(loaded, total)
        return made

    rest = load(outer, "")
    layers = (
        LayerWeights(**load(tensors, f"model.layers.{index}."))
        for index, tensors in enumerate(inner)
    )
    return DecoderWeights(layers=layers, kinds=kinds, **{"head": rest["embedding"], **rest})


def _open(files: Weights, config: DecoderConfig) -> Source:
    if files.kind == "safetensors":
        interleaved = config.interleaved_experts
        tensors = TensorFiles(files.paths, interleaved_experts=interleaved)
        return SafetensorsSource(tensors, config)
    if files.kind == "gguf":
        from pagefleet_worker.model.gguf_weights import GgufSource

        return GgufSource([Path(path) for path in files.paths], config)
    raise ModelError("This model has no weights: it runs with --engine echo or --engine sim.")


class SafetensorsSource:
    """Files of safetensors, whose matrices may be quantized in some format."""

    def __init__(self, tensors: TensorFiles, config: DecoderConfig) -> None:
        self._tensors, self._format = tensors, config.format
        self.norm_offset = config.norm_offset

    def copy(self, name: str, target: Tensor, cuts: Sequence[Cut]) -> None:
        """See `Source`; of what is not quantized only that part is read."""
        shape = [cut.whole for cut in cuts]
        stored = self._stored(name, shape)
        whole = self._tensors.read(name, shape) if stored is None else stored.dequantized()
        put_part(target, whole, cuts)

    def quantized(self, name: str, shape: Sequence[int]) -> Quantized | None:
        """See `Source`."""
        stored = self._stored(name, shape)
        return None if stored is None else stored.quantized()

    def _stored(self, name: str, shape: Sequence[int]) -> StoredMatrix | None:
        if self._format is None or len(shape) != 2:
            return None
        outputs, inputs = shape
        return self._format.matrix(self._tensors, name.removesuffix(".weight"), (outputs, inputs))
