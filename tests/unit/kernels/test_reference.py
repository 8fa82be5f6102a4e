"""The plain twins against dense attention and torch's own operators, in float64."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from pagefleet_kernels import reference
from tests.unit.kernels.paged_case import dense_attention, fresh_seed, paged_case, per_head

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
