"""What the engine asks of a model: `Decoder` and the adapter of transformers are alike here."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagefleet_worker.paging.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model that pools, kernels and settings depend on.

    windows: for each layer, how many positions up to its own a query sees; 0 means all.
    dtype: the one the weights were saved in, as torch names it, if the config says so.
    """

    vocab_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    dtype: str | None

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def planes(self) -> int:
        """Of a layer's pool: one of keys and one of values, or one of both."""
        return 2


class CausalModel(Protocol):
    """Turns the tokens of a step into logits, over a paged KV pool."""

    @property
    def config(self) -> ModelShape:
        """The sizes of the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """That of the pool's keys and values."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are, and the pool."""
        ...

    @property
    def adapters(self) -> int:
        """LoRA adapters that are loaded; their numbers count from 1."""
        ...

    def hidden(self, batch: Batch, pool: Tensor) -> Tensor:
        """Run all layers over the batch; keys and values are written to the pool.

        Args:
            batch: the step's rows.
            pool: [layers, planes, N, G, S, D].

        Returns:
            [P, hidden size], for `logits`.
        """
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The vocabulary's scores at some tokens.

        Args:
            hidden: [P, hidden size], from `hidden`.
            rows: int64 [L], which of its rows.

        Returns:
            float32 [L, vocabulary size].
        """
        ...
