"""Random rows over a paged cache, for the tests of every kernel: blocks in random order, and NaN
wherever no kernel may look.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedCase:
    """The arguments of `attention`, and what each row's keys and values are without paging."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    tables: Tensor
    starts: Tensor
    offsets: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.tables,
            self.starts,
            self.offsets,
        )

    def in_panels(self) -> "PagedCase":
        """The same caches as the CPU's pool keeps them: keys in panels, beside their values."""
        caches = torch.stack([as_panels(self.key_cache), self.value_cache], dim=1)
        return replace(self, key_cache=caches[:, 0], value_cache=caches[:, 1])


def as_panels(rows: Tensor) -> Tensor:
    """Keys [N, G, S, D], each sixteen rows of words transposed (see `cpu_rows`)."""
    words = rows.contiguous().view(torch.int32).unflatten(2, (-1, 16))
    return words.transpose(3, 4).contiguous().view(rows.dtype).view(rows.shape)


def fresh_seed() -> int:
    """A new seed, printed: pytest shows it when the test fails."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


def paged_case(
    rows: list[tuple[int, int]],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
) -> PagedCase:
    """A step with `rows` of (start, new tokens)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    needed = [-(-(start + count) // block_size) for start, count in rows]
    blocks = torch.randperm(sum(needed) + 2, generator=generator).to(torch.int32)
    caches = torch.full((2, len(blocks), kv_heads, block_size, head_size), torch.nan, dtype=dtype)
    tables = torch.full((len(rows), max(needed) + 1), -(2**30), dtype=torch.int32)
    contents: tuple[list[Tensor], list[Tensor]] = ([], [])
    used = 0
    for row, (start, count) in enumerate(rows):
        tables[row, : needed[row]] = blocks[used : used + needed[row]]
        used += needed[row]
        for cache, content in zip(caches, contents, strict=True):
            content.append(normal(kv_heads, start + count, head_size))
            for position in range(start + count):
                block = int(tables[row, position // block_size])
                cache[block, :, position % block_size] = content[-1][:, position]
    counts = [count for _, count in rows]
    return PagedCase(
        query=normal(sum(counts), heads, head_size),
        key_cache=caches[0],
        value_cache=caches[1],
        tables=tables,
        starts=torch.tensor([start for start, _ in rows], dtype=torch.int32),
        offsets=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        keys=contents[0],
        values=contents[1],
    )


def latent_case(
    rows: list[tuple[int, int]],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    rank: int = 48,
    turned: int = 16,
    block_size: int = 16,
) -> PagedCase:
    """`paged_case` of latents: what is cached of a token is one key, whose first `rank` numbers are
    its value.
    """
    sizes = {"kv_heads": 1, "head_size": rank + turned, "block_size": block_size}
    case = paged_case(rows, seed=seed, dtype=dtype, heads=heads, **sizes)
    values = [keys[..., :rank] for keys in case.keys]
    return replace(case, value_cache=case.key_cache[..., :rank], values=values)


def per_head(options: dict[str, Any], heads: int, seed: int = 0) -> dict[str, Any]:
    """Options of attention, with random numbers for each head where they are True."""
    generator = torch.Generator().manual_seed(seed)
    ranges = {"slopes": (0, 1), "sinks": (-4, 8)}
    return {
        name: torch.empty(heads).uniform_(*ranges[name], generator=generator)
        if value is True
        else value
        for name, value in options.items()
    }


def dense_attention(case: PagedCase, scale: float, **options: Any) -> Tensor:
    """The oracle: float64, without pages, by torch's own `scaled_dot_product_attention` where it
    can (it knows no soft cap and no sinks).
    """
    window, softcap = options.get("window", 0), options.get("softcap", 0.0)
    slopes, sinks = options.get("slopes"), options.get("sinks")
    outputs = []
    for row, start in enumerate(case.starts.tolist()):
        first, last = case.offsets[row : row + 2].tolist()
        if first == last:
            continue
        query = case.query[first:last].double().transpose(0, 1)
        groups = query.shape[0] // case.keys[row].shape[0]
        key = case.keys[row].double().repeat_interleave(groups, 0)
        value = case.values[row].double().repeat_interleave(groups, 0)
        distance = torch.arange(key.shape[1])[None] - torch.arange(start, key.shape[1])[:, None]
        seen = (distance <= 0) & (distance > -window if window else torch.tensor(True))
        bias = torch.zeros(distance.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        if slopes is not None:
            bias = bias + slopes.double()[:, None, None] * distance
        if softcap or sinks is not None:
            scores = query @ key.transpose(1, 2) * scale
            scores = (softcap * torch.tanh(scores / softcap) if softcap else scores) + bias
            most = scores.amax(-1, keepdim=True)
            powers = torch.exp(scores - most)
            sunk = torch.exp(sinks.double()[:, None, None] - most) if sinks is not None else 0
            output = powers / (powers.sum(-1, keepdim=True) + sunk) @ value
        else:
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=bias.expand(query.shape[0], -1, -1), scale=scale
            )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)
