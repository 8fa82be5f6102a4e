"""How the ranks of a worker share a model's tensors (Shoeybi et al., "Megatron-LM", 2019, section
3; Kwon et al., "PagedAttention", SOSP 2023, section 4.6).

Each rank has some of the heads, with their keys and values, and some of the inner neurons of every
layer, or of every expert: rows of the matrices that lead there, and the columns that lead back.
What the ranks compute are summands of the layer's outputs. The vocabulary is dealt out too, by
rows.

Where there are fewer key/value heads than ranks, neighbours hold the same one; so every rank holds
all latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model_files import ModelError


@dataclass(frozen=True)
class Cut:
    """Of `whole` rows or columns, `count` from `first` on; those beyond `whole` are zeros."""

    first: int
    count: int
    whole: int

    @classmethod
    def all(cls, count: int) -> Self:
        """Every one."""
        return cls(0, count, count)

    @staticmethod
    def stacked(cuts: Sequence["Cut"]) -> list["Cut"]:
        """The same where the wholes lie one behind the other in one matrix; what touches is one."""
        whole, begin = sum(cut.whole for cut in cuts), 0
        stacked: list[Cut] = []
        for cut in cuts:
            first, count = begin + cut.first, cut.count
            if stacked and stacked[-1].span.stop == first:
                first, count = stacked[-1].first, stacked.pop().count + count
            stacked.append(Cut(first, count, whole))
            begin += cut.whole
        return stacked

    def times(self, width: int) -> "Cut":
        """The same of things that are `width` rows or columns each."""
        return Cut(self.first * width, self.count * width, self.whole * width)

    def among(self, count: int, index: int) -> "Cut":
        """The same of the one at `index` of so many wholes that lie one behind the other."""
        return Cut(index * self.whole + self.first, self.count, count * self.whole)

    @property
    def span(self) -> slice:
        """Where they are in the whole."""
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True)
class ModuleShare:
    """Of a linear module, as files name it: `rows` of its outputs, more than one cut where several
    matrices lie one below the other in it, and `columns` of its inputs.
    """

    name: str
    rows: tuple[Cut, ...]
    columns: Cut

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the whole module."""
        return self.rows[0].whole, self.columns.whole


@dataclass(frozen=True)
class Share:
    """What one of a worker's `ranks` holds, `rank` counting from 0."""

    rank: int
    ranks: int

    def even(self, count: int) -> Cut:
        """Of things that divide evenly."""
        each = count // self.ranks
        return Cut(self.rank * each, each, count)

    def padded(self, count: int) -> Cut:
        """As many of each, so that the last ones may be too many."""
        each = -(-count // self.ranks)
        return Cut(self.rank * each, each, count)

    def kv_heads(self, count: int) -> Cut:
        """Those that this rank's query heads read."""
        return Cut(self.rank * count // self.ranks, max(count // self.ranks, 1), count)

    def modules(self, config: DecoderConfig) -> dict[str, list[ModuleShare]]:
        """Of the modules that each matrix of a layer is stacked of, see `DecoderConfig.modules`."""
        hidden, inner = Cut.all(config.hidden_size), self.even(config.intermediate_size)
        stacked = {
            **self._attention(config),
            "gate_up": ([inner, inner], hidden),
            "down": ([hidden], inner),
        }
        modules: dict[str, list[ModuleShare]] = {}
        for field, names in config.modules.items():
            cuts, columns = stacked[field]
            rows = [[cut] for cut in cuts] if len(names) == len(cuts) else [Cut.stacked(cuts)]
            modules[field] = [
                ModuleShare(name, tuple(each), columns)
                for name, each in zip(names, rows, strict=True)
            ]
        return modules

    def _attention(self, config: DecoderConfig) -> dict[str, tuple[list[Cut], Cut]]:
        """Rows and columns of what stands before and behind attention."""
        heads, hidden, latent = self.even(config.heads), Cut.all(config.hidden_size), config.latent
        if latent is None:
            query = heads.times(config.head_dim)
            kv = self.kv_heads(config.kv_heads).times(config.head_dim)
            return {"qkv": ([query, kv, kv], hidden), "output": ([hidden], query)}
        query, entry = heads.times(latent.query), Cut.all(latent.entry)
        output = ([hidden], heads.times(latent.value))
        if latent.query_rank is None:
            return {"qkv": ([query, entry], hidden), "output": output}
        rank = Cut.all(latent.query_rank)
        return {
            "qkv": ([rank, entry], hidden),
            "query_up": ([query], rank),
            "output": output,
        }

    def of(self, config: DecoderConfig) -> DecoderConfig:
        """The sizes of this share of a model; its vocabulary's stays the whole one.

        Raises:
            ModelError: the model cannot be shared evenly by so many.
        """
        ranks, heads, kv_heads = self.ranks, config.heads, config.kv_heads
        if not _is_shared_by(config, ranks):
            possible = [n for n in range(1, heads + 1) if _is_shared_by(config, n)]
            raise ModelError(
                f"{ranks} devices cannot share {heads} attention heads, {kv_heads} key/value heads "
                f"and {' or '.join(map(str, sorted(config.inner_sizes)))} inner neurons evenly. "
                f"--tensor-parallel-size may be {', '.join(map(str, possible))} for this model."
            )
        return replace(
            config,
            heads=self.even(heads).count,
            kv_heads=self.kv_heads(kv_heads).count,
            intermediate_size=self.even(config.intermediate_size).count,
            experts=tuple(
                each and each.narrowed(self.even(each.inner_size).count) for each in config.experts
            ),
        )


WHOLE = Share(0, 1)
"""That of a rank that is alone."""


def put_part(target: Tensor, whole: Tensor, cuts: Sequence[Cut]) -> None:
    """Copy the part of a tensor that `cuts` say, one for each dimension, to the rows of `target`,
    of which the last may be too many.
    """
    part = whole[tuple(cut.span for cut in cuts)]
    target[: len(part)].copy_(part)


def _is_shared_by(config: DecoderConfig, ranks: int) -> bool:
    kv_heads = config.kv_heads
    return (
        config.heads % ranks == 0
        and not any(size % ranks for size in config.inner_sizes)
        and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    )
