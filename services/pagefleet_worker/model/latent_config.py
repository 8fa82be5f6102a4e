"""What a config says of latents, which keys and values are made of, see `layers.LatentLayers`."""

from dataclasses import dataclass

import torch
from torch import Tensor

NORM_EPS = 1e-6
"""Of the norms of latents, whatever the config says of others."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of attention over latents.

    rank: of a latent.
    query_rank: of the latents of queries; None if these have none.
    still: of the part of a head's queries and keys that does not turn.
    turned: of the part that does, behind the other.
    value: of a head's values.
    interleaved: whether the dimensions that turn together are neighbours in the files.
    """

    rank: int
    query_rank: int | None
    still: int
    turned: int
    value: int
    interleaved: bool

    @property
    def query(self) -> int:
        """Size of a head's queries."""
        return self.still + self.turned

    @property
    def entry(self) -> int:
        """Numbers of a token in a layer's pool."""
        return self.rank + self.turned

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """See `DecoderConfig.modules`; those that lead to attention."""
        down = "self_attn.kv_a_proj_with_mqa"
        if self.query_rank is None:
            return {"qkv": ("self_attn.q_proj", down)}
        return {"qkv": ("self_attn.q_a_proj", down), "query_up": ("self_attn.q_b_proj",)}

    def row_orders(self, heads: int) -> dict[str, Tensor]:
        """See `DecoderConfig.row_orders`."""
        if not self.interleaved:
            return {}
        query = _order(self.still, self.turned)
        queries = (torch.arange(heads).unsqueeze(1) * self.query + query).flatten()
        entry = _order(self.rank, self.turned)
        first = queries if self.query_rank is None else torch.arange(self.query_rank)
        orders = {"qkv": torch.cat((first, len(first) + entry))}
        return orders if self.query_rank is None else orders | {"query_up": queries}


def _order(still: int, turned: int) -> Tensor:
    """The dimensions, those that turn behind the others, and pairs half of these apart."""
    pairs = torch.arange(still, still + turned).view(-1, 2)
    return torch.cat((torch.arange(still), pairs.T.flatten()))
