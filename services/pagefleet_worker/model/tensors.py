"""Which tensors of a file make one of the decoder's, stacked along their rows (`Fused`), of every
layer. Names are those of Hugging Face's Llama family; a source of another naming translates.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagefleet_kernels.quantized import Kind, Quantized
from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model.expert_config import ExpertShape
from pagefleet_worker.model.family import QkNorm
from pagefleet_worker.model.shares import Cut, Share

_EMBEDDING = "model.embed_tokens.weight"


class Source(Protocol):
    """Weight files that know their tensors by name."""

    @property
    def norm_offset(self) -> float:
        """What the weights of norms lack in the files."""
        ...

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
class Norm:
    """The weight of a norm; `wide` if it is float32 whatever the others are. Number i of it is
    number `order[i]` of the file's, int64.
    """

    name: str
    size: Cut
    wide: bool
    order: Tensor | None = None

    def load(self, source: Source, prefix: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the tensor and fill it."""
        kind = torch.float32 if self.wide else dtype
        tensor = torch.zeros(self.size.count, dtype=kind, device=device)
        source.copy(prefix + self.name, tensor, [self.size])
        if source.norm_offset:
            tensor.add_(source.norm_offset)
        return tensor if self.order is None else tensor[self.order.to(device)]


@dataclass(frozen=True)
class Fused:
    """A tensor of the decoder: parts (name, rows), stacked; without `columns` it is a vector. Row i
    of it is row `order[i]` of what is stacked, int64. Behind the parts stand `wider` ones (name,
    rows, columns), which are as many columns of larger matrices. For `wide` see `Norm`.
    """

    parts: tuple[tuple[str, Cut], ...]
    columns: Cut | None = None
    order: Tensor | None = None
    wider: tuple[tuple[str, Cut, Cut], ...] = ()
    wide: bool = False

    @property
    def _pieces(self) -> list[tuple[str, list[Cut]]]:
        """What is stacked: names, and cuts of each dimension."""
        columns = [] if self.columns is None else [self.columns]
        pieces = [(name, [rows, *columns]) for name, rows in self.parts]
        return pieces + [(name, cuts) for name, *cuts in self.wider]

    def load(self, source: Source, prefix: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the tensor and fill it."""
        sizes = [cuts[0].count for _, cuts in self._pieces]
        shape = [sum(sizes), *(() if self.columns is None else (self.columns.count,))]
        kind = torch.float32 if self.wide else dtype
        tensor = torch.zeros(shape, dtype=kind, device=device)
        for (name, cuts), part in zip(self._pieces, torch.split(tensor, sizes), strict=True):
            source.copy(prefix + name, part, cuts)
        return tensor if self.order is None else tensor[self.order.to(device)]

    def quantized(self, source: Source, prefix: str, kinds: Set[Kind]) -> Quantized | None:
        """The matrix as the files have it, if its numbers are of these `kinds`, and no group of
        theirs is cut.
        """
        if self.columns is None:
            return None
        parts = []
        for name, (rows, columns) in self._pieces:
            part = source.quantized(prefix + name, (rows.whole, columns.whole))
            if part is None or part.kind not in kinds or rows.span.stop > rows.whole:
                return None
            begin, end = columns.span.start, columns.span.stop
            if begin % part.group or (end % part.group and end < columns.whole):
                return None
            parts.append(part.part(rows.span, columns.span))
        if len({part.kind for part in parts}) > 1:
            return None
        matrix = Quantized.stacked(parts)
        return matrix if self.order is None else matrix.rows(self.order)


def outer_tensors(
    config: DecoderConfig, share: Share, *, own_head: bool
) -> dict[str, Fused | Norm]:
    """Those around the layers, by fields of `DecoderWeights`. With `own_head` the head has a matrix
    of its own where the model ties it to the embedding, too.
    """
    vocabulary, hidden = share.padded(config.vocab_size), Cut.all(config.hidden_size)
    tensors: dict[str, Fused | Norm] = {
        "embedding": Fused(((_EMBEDDING, vocabulary),), hidden),
        "norm": Norm("model.norm.weight", hidden, config.wide_norms),
    }
    if own_head or not config.tied_embeddings:
        name = _EMBEDDING if config.tied_embeddings else "lm_head.weight"
        tensors["head"] = Fused(((name, vocabulary),), hidden)
    return tensors


def layer_tensors(config: DecoderConfig, share: Share, layer: int) -> dict[str, Fused | Norm]:
    """Those of a layer, by fields of `LayerWeights`; their names have no prefix."""
    first = share.rank == 0  # what comes out of these is summed over the ranks
    biases = {"qkv": config.qkv_bias, "output": config.output_bias and first}
    tensors: dict[str, Fused | Norm] = {**_norms(config, layer)}
    if config.latent is not None:
        ups = share.even(config.heads).times(config.latent.still + config.latent.value)
        kv_up = ("self_attn.kv_b_proj.weight", ups)
        tensors["kv_up"] = Fused((kv_up,), Cut.all(config.latent.rank))
        if config.latent.query_rank is not None:
            biases["query_up"] = False
    if config.sinks:
        sinks = ("self_attn.sinks", share.even(config.heads))
        tensors["sinks"] = Fused((sinks,), wide=True)
    if (experts := config.experts_of(layer)) is not None:
        tensors |= _expert_tensors(config, experts, share)
    else:
        biases |= {"gate_up": config.mlp_bias, "down": config.mlp_bias and first}
    modules, orders = share.modules(config), share.of(config).row_orders(layer)
    for field, bias in biases.items():
        order = orders.get(field)
        weights, vectors = (
            tuple((f"{each.name}.{kind}", cut) for each in modules[field] for cut in each.rows)
            for kind in ("weight", "bias")
        )
        tensors[field] = Fused(weights, modules[field][0].columns, order)
        if bias:
            tensors[f"{field}_bias"] = Fused(vectors, order=order)
    return tensors


def _expert_tensors(config: DecoderConfig, experts: ExpertShape, share: Share) -> dict[str, Fused]:
    """Files hold shared experts as one that is wider: each is some of its neurons."""
    hidden = Cut.all(config.hidden_size)
    inner, shared = share.even(experts.inner_size), experts.routing.shared
    each = [(f"mlp.experts.{name}", inner) for name in range(experts.count)]
    weighted = experts.routing.other_scores > 0
    shared_name = "mlp.shared_expert" if weighted else "mlp.shared_experts"
    each += [(shared_name, inner.among(shared, index)) for index in range(shared)]
    gates = [(f"{name}.{kind}_proj", rows) for name, rows in each for kind in ("gate", "up")]
    downs = [(f"{name}.down_proj", columns) for name, columns in each]
    router = [("mlp.gate", Cut.all(experts.count))]
    router += [("mlp.shared_expert_gate", Cut.all(1))] * experts.routing.other_scores

    def named(parts: list[tuple[str, Cut]], kind: str) -> tuple[tuple[str, Cut], ...]:
        return tuple((f"{name}.{kind}", rows) for name, rows in parts)

    wider = tuple((name, hidden, columns) for name, columns in named(downs, "weight"))
    tensors = {
        "router": Fused(named(router, "weight"), hidden),
        "gate_up": Fused(named(gates, "weight"), hidden),
        "down": Fused((), inner, wider=wider),
    }
    if experts.routing.sigmoid:
        correction = ("mlp.gate.e_score_correction_bias", Cut.all(experts.count))
        tensors["correction"] = Fused((correction,), wide=True)
    if config.mlp_bias:
        tensors["router_bias"] = Fused(named(router, "bias"))
        tensors["gate_up_bias"] = Fused(named(gates, "bias"))
        if share.rank == 0:  # what comes out of these is summed over the ranks
            tensors["down_bias"] = Fused(named([(name, hidden) for name, _ in downs], "bias"))
    return tensors


def _norms(config: DecoderConfig, layer: int) -> dict[str, Norm]:
    hidden = Cut.all(config.hidden_size)
    names: dict[str, str] = {}
    if config.pre_norms:
        kind = "pre_feedforward" if config.post_norms else "post_attention"
        names |= {"attention_norm": "input_layernorm", "mlp_norm": f"{kind}_layernorm"}
    if config.post_norms:
        names["post_attention_norm"] = "post_attention_layernorm"
        names["post_mlp_norm"] = "post_feedforward_layernorm"
    norms = {
        field: Norm(f"{config.names.get(name, name)}.weight", hidden, config.wide_norms)
        for field, name in names.items()
    }
    return norms | _qk_norms(config, layer)


def _qk_norms(config: DecoderConfig, layer: int) -> dict[str, Norm]:
    names = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    sizes, order = dict.fromkeys(names, config.head_dim), None
    if config.latent is not None:
        names = {"query_norm": "self_attn.q_a_layernorm", "key_norm": "self_attn.kv_a_layernorm"}
        sizes = {"query_norm": config.latent.query_rank or 0, "key_norm": config.latent.rank}
    elif config.qk_norm is QkNorm.NONE:
        return {}
    elif config.qk_norm is QkNorm.WHOLE:
        sizes = {"query_norm": config.query_size, "key_norm": config.kv_size}
    else:
        order = config.ropes[layer].order(config.head_dim)
    return {
        field: Norm(f"{name}.weight", Cut.all(sizes[field]), config.wide_norms, order)
        for field, name in names.items()
        if sizes[field]
    }
