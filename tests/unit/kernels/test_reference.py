"""The plain twins against dense attention and torch's own operators, in float64."""

from dataclasses import replace

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from pagefleet_kernels import reference
from tests.unit.kernels.paged_case import (
    dense_attention,
    fresh_seed,
    latent_case,
    paged_case,
    per_head,
)

ROWS = [(0, 1), (7, 9), (40, 1), (0, 33), (16, 0), (15, 17)]


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"softcap": 3.0}, {"slopes": True}, {"window": 5, "sinks": True}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention_is_dense_attention_over_the_rows_blocks(options):
    case = paged_case(
        ROWS, seed=fresh_seed(), dtype=torch.float64, heads=4, kv_heads=2, head_size=8
    )
    options = per_head(options, 4)
    output = reference.attention(*case.arguments(), scale=0.3, **options)
    torch.testing.assert_close(output, dense_attention(case, 0.3, **options))


def test_attention_over_latents_is_that_of_all_heads_keys_and_values():
    """Multi-head latent attention as it is defined: keys and values made of latents, of each head
    its own, beside the key that all share; absorbed queries give the same ("DeepSeek-V2", 2024,
    section 2.1).
    """
    torch.manual_seed(fresh_seed())
    heads, rank, turned, size, scale = 5, 24, 8, 16, 0.2
    case = latent_case(
        ROWS, seed=fresh_seed(), dtype=torch.float64, heads=heads, rank=rank, turned=turned
    )
    key_up, value_up = torch.randn(2, heads, size, rank, dtype=torch.float64)
    query = torch.randn(len(case.query), heads, size + turned, dtype=torch.float64)
    plain, rotated = query.split([size, turned], dim=2)
    absorbed = torch.cat([reference.by_heads(key_up.mT)(plain), rotated], dim=2)
    latents = reference.attention(absorbed, *case.arguments()[1:], scale=scale)
    found = reference.by_heads(value_up)(latents)
    keys = [
        torch.cat([key_up @ entry[:, :, :rank].mT, entry[..., rank:].mT.expand(heads, -1, -1)], 1)
        for entry in case.keys
    ]
    values = [value_up @ entry.mT for entry in case.values]
    dense = replace(case, query=query, keys=[k.mT for k in keys], values=[v.mT for v in values])
    torch.testing.assert_close(found, dense_attention(dense, scale))


def test_latents_are_written_with_their_rotated_keys():
    torch.manual_seed(fresh_seed())
    tokens, slots = 7, torch.randperm(20)[:7]
    angles, positions = torch.rand(30, 4, dtype=torch.float64), torch.randint(30, (tokens,))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    query, latent = torch.randn(tokens, 3, 12).double(), torch.randn(tokens, 6).double()
    key, cache = torch.randn(tokens, 8).double(), torch.zeros(5, 1, 4, 14).double()
    rotated = reference.rotary_write_latents(query, latent, key, cos_sin, positions, cache, slots)
    pool = torch.zeros(2, 5, 1, 4, 8).double()
    rest = key[:, None], cos_sin, positions, pool[0], pool[1], slots
    turned = reference.rotary_write_kv(query[..., 4:], key[:, None], *rest)
    assert torch.equal(rotated, torch.cat([query[..., :4], turned], dim=2))
    assert torch.equal(cache[..., 6:], pool[0])
    flat = cache.view(20, 14)
    assert torch.equal(flat[slots, :6], latent)
    flat[slots] = 0
    assert not flat.any()


def test_written_keys_and_values_are_found_where_their_slots_say():
    torch.manual_seed(fresh_seed())
    caches = torch.zeros(2, 5, 3, 4, 8)
    key, value = torch.randn(2, 7, 3, 8)
    slots = torch.randperm(20)[:7]
    reference.write_kv(key, value, caches[0], caches[1], slots)
    flat = caches.transpose(2, 3).reshape(2, 20, 3, 8)
    torch.testing.assert_close(flat[0, slots], key)
    torch.testing.assert_close(flat[1, slots], value)
    flat[:, slots] = 0
    assert not flat.any()


def test_copies_read_all_sources_before_they_write():
    caches = torch.arange(4.0).reshape(1, 1, 4, 1, 1, 1).expand(2, 2, 4, 1, 2, 3).clone()
    reference.copy_blocks(caches, torch.tensor([[0, 1], [1, 0], [2, 3]]))
    assert caches[1, 0, :, 0, 0, 0].tolist() == [1.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("norm", "kept"),
    [
        (LlamaRMSNorm, lambda weight: weight),
        (Gemma2RMSNorm, lambda weight: weight.float() + 1),
        (Olmo2RMSNorm, lambda weight: weight.float()),
    ],
)
def test_norms_round_where_transformers_do(norm, kept, dtype):
    torch.manual_seed(fresh_seed())
    theirs = norm(96, eps=1e-6).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    values = torch.randn(50, 96).to(dtype)
    with torch.no_grad():
        expected = theirs(values)
        found = reference.rms_norm(values, kept(theirs.weight), 1e-6)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
