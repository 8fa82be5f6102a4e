"""From weight files to the decoder's tensors: fused, in the serving dtype, on the device.

`Fused` says which tensors of a file, stacked along their rows, make one of the decoder's, and one
table of them drives the loader. Every target is made once and filled piece by piece, straight from
the memory-mapped file, so that the model is never held twice. A rank of several keeps its share of
each (see `shares`). Names are those of Hugging Face's Llama family; a source of another naming
translates. Pickled weights are never read.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pagefleet.manifest import Weights
from pagefleet_kernels.quantized import GROUP, Matrix, Quantized
from pagefleet_worker.config import DecoderConfig
from pagefleet_worker.families import QkNorm
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.safetensors_files import TensorFiles
from pagefleet_worker.shares import WHOLE, Cut, Share, put_part
from pagefleet_worker.stored_matrix import Format, StoredMatrix

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Quantization:
    """Which matrices are kept in few bits; embeddings never are.

    own: bits of a number in which those of the files are taken as they are.
    others: whether all others are rounded to eight bits.
    """

    own: Sequence[int] = ()
    others: bool = False


PLAIN = Quantization()
INT8 = Quantization((8,), others=True)
OWN = Quantization((4, 8))
OWN_OR_INT8 = Quantization((4, 8), others=True)

Progress = Callable[[int, int], None]
"""Told how many of how many tensors are loaded."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, matrices as [outputs, inputs]."""

    attention_norm: Tensor
    qkv: Matrix
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """A whole decoder; `head` is `embedding` itself where the model ties them and it is not
    quantized. `bits` are those of the numbers of quantized matrices, of all that was read so far.

    Layers are read when they are taken, once: whoever makes something else of each never holds
    the model twice.
    """

    embedding: Tensor
    layers: Iterable[LayerWeights]
    norm: Tensor
    head: Matrix
    bits: Set[int] = frozenset()


class Source(Protocol):
    """Weight files that know their tensors by name."""

    def copy(self, name: str, target: Tensor, cuts: Sequence[Cut]) -> None:
        """Fill `target`, of any floating dtype and device, with a part of the tensor `name`; `cuts`
        has one for each of its dimensions.

        Raises:
            ModelError: there is none, or it has another shape.
        """
        ...

    def quantized(self, name: str, shape: Sequence[int]) -> Quantized | None:
        """The matrix `name` in the file's own numbers, if they come in such groups.

        Raises:
            ModelError: there is none, or it has another shape.
        """
        ...


@dataclass(frozen=True)
class Fused:
    """A tensor of the decoder: parts (name, rows), stacked; without `columns` it is a vector."""

    parts: tuple[tuple[str, Cut], ...]
    columns: Cut | None = None

    def load(self, source: Source, prefix: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the tensor and fill it."""
        sizes = [rows.count for _, rows in self.parts]
        inputs = [] if self.columns is None else [self.columns]
        shape = [sum(sizes), *(cut.count for cut in inputs)]
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        for (name, rows), part in zip(self.parts, torch.split(tensor, sizes), strict=True):
            source.copy(prefix + name, part, [rows, *inputs])
        return tensor

    def quantized(self, source: Source, prefix: str, bits: Sequence[int]) -> Quantized | None:
        """The matrix as the files have it, if they have it in so many `bits`, and no group of
        theirs is cut.
        """
        if self.columns is None or self.columns.first % GROUP or self.columns.count % GROUP:
            return None
        parts = []
        for name, rows in self.parts:
            part = source.quantized(prefix + name, (rows.whole, self.columns.whole))
            if part is None or part.bits not in bits or rows.span.stop > rows.whole:
                return None
            parts.append(part.part(rows.span, self.columns.span))
        return Quantized.stacked(parts) if len({part.bits for part in parts}) == 1 else None


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
    outer = _outer_tensors(config, share, own_head=quantization.others)
    inner = _layer_tensors(config, share)
    source = _open(files, config)
    loaded, total = 0, len(outer) + config.layers * len(inner)
    bits: set[int] = set()

    def few_bits(fused: Fused, prefix: str) -> Quantized | None:
        own = fused.quantized(source, prefix, quantization.own) if quantization.own else None
        if own is None and quantization.others and fused.columns is not None:
            return Quantized.of(fused.load(source, prefix, torch.float32, torch.device("cpu")))
        return own

    def load(tensors: dict[str, Fused], prefix: str) -> dict[str, Any]:
        nonlocal loaded
        made: dict[str, Matrix] = {}
        for field, fused in tensors.items():
            matrix = None if field == "embedding" else few_bits(fused, prefix)
            if matrix is None:
                made[field] = fused.load(source, prefix, dtype, device)
            else:
                made[field] = matrix.to(device)
                bits.add(matrix.bits)
            loaded += 1
            progress(loaded, total)
        return made

    rest = load(outer, "")
    layers = (
        LayerWeights(**load(inner, f"model.layers.{index}.")) for index in range(config.layers)
    )
    return DecoderWeights(layers=layers, bits=bits, **{"head": rest["embedding"], **rest})


def _outer_tensors(config: DecoderConfig, share: Share, *, own_head: bool) -> dict[str, Fused]:
    vocabulary, hidden = share.padded(config.vocab_size), Cut.all(config.hidden_size)
    tensors = {
        "embedding": Fused(((_EMBEDDING, vocabulary),), hidden),
        "norm": Fused((("model.norm.weight", hidden),)),
    }
    if own_head or not config.tied_embeddings:
        name = _EMBEDDING if config.tied_embeddings else "lm_head.weight"
        tensors["head"] = Fused(((name, vocabulary),), hidden)
    return tensors


def _layer_tensors(config: DecoderConfig, share: Share) -> dict[str, Fused]:
    hidden, inner = Cut.all(config.hidden_size), share.even(config.intermediate_size)
    query = share.even(config.heads).times(config.head_dim)
    kv = share.kv_heads(config.kv_heads).times(config.head_dim)
    first = share.rank == 0  # what comes out of these is summed over the ranks
    output_bias, down_bias = config.output_bias and first, config.mlp_bias and first
    matrices = {
        "qkv": ((("q_proj", query), ("k_proj", kv), ("v_proj", kv)), hidden, config.qkv_bias),
        "output": ((("o_proj", hidden),), query, output_bias),
        "gate_up": ((("gate_proj", inner), ("up_proj", inner)), hidden, config.mlp_bias),
        "down": ((("down_proj", hidden),), inner, down_bias),
    }
    norms = [("attention_norm", "input_layernorm", hidden)]
    norms += [("mlp_norm", "post_attention_layernorm", hidden)]
    if config.qk_norm is not QkNorm.NONE:
        head = Cut.all(config.head_dim)
        norms += [("query_norm", "self_attn.q_norm", head)]
        norms += [("key_norm", "self_attn.k_norm", head)]
    tensors = {field: Fused(((f"{name}.weight", size),)) for field, name, size in norms}
    for field, (parts, columns, bias) in matrices.items():
        module = "self_attn" if field in ("qkv", "output") else "mlp"
        named = [(f"{module}.{name}", rows) for name, rows in parts]
        tensors[field] = Fused(tuple((f"{name}.weight", rows) for name, rows in named), columns)
        if bias:
            tensors[f"{field}_bias"] = Fused(tuple((f"{name}.bias", rows) for name, rows in named))
    return tensors


def _open(files: Weights, config: DecoderConfig) -> Source:
    if files.kind == "safetensors":
        return SafetensorsSource(TensorFiles(files.paths), config.format)
    if files.kind == "gguf":
        from pagefleet_worker.gguf_weights import GgufSource

        return GgufSource(Path(files.paths[0]), config)
    raise ModelError("This model has no weights: it runs with --engine echo or --engine sim.")


class SafetensorsSource:
    """Files of safetensors, whose matrices may be quantized in some format."""

    def __init__(self, tensors: TensorFiles, format: Format | None) -> None:
        self._tensors, self._format = tensors, format

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
