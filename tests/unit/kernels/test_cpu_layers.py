"""The compiled norms, activation, rotary embedding and KV write against their plain twins."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from pagefleet_kernels import cpu_cache, cpu_layers, reference
from pagefleet_kernels.layers import Activation
from tests.unit.kernels.paged_case import as_panels, fresh_seed

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


@DTYPES
@pytest.mark.parametrize("size", [8, 100, 576])
def test_norms_agree_with_the_reference(dtype, size):
    torch.manual_seed(fresh_seed())
    values, residual = torch.randn(2, 9, size).to(dtype)
    weight = torch.rand(size).to(dtype)
    assert_close(
        cpu_layers.rms_norm(values, weight, 1e-5), reference.rms_norm(values, weight, 1e-5)
    )
    kept = residual.clone()
    fused = cpu_layers.add_rms_norm(values, residual, weight, 1e-5)
    for actual, expected in zip(
        fused, reference.add_rms_norm(values, residual, weight, 1e-5), strict=True
    ):
        assert_close(actual, expected)
    assert torch.equal(residual, kept)


@DTYPES
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("following", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_norms_of_what_is_added(dtype, wide, following, factor):
    """What is added is rounded three times at most, each of which may go to the neighbour of where
    the twin's goes; the residual may cancel all but that. So the sum is compared by the size of
    what is added, and its norm with that of the sum found.
    """
    torch.manual_seed(fresh_seed())
    values, residual = torch.randn(2, 9, 100).to(dtype)
    weight, post = (1 + 0.2 * torch.randn(2, 100)).to(torch.float32 if wide else dtype)
    for kind in (post, None):
        own = weight if following else None
        normed, added = cpu_layers.add_rms_norm(values, residual, own, 1e-5, kind, factor)
        part, expected = (
            reference.add_rms_norm(values, before, None, 1e-5, kind, factor)[1]
            for before in (torch.zeros_like(residual), residual)
        )
        assert added.dtype == dtype
        allowed = torch.finfo(dtype).eps * (3 * part.abs() + expected.abs()).double() + 1e-5
        assert ((added.double() - expected.double()).abs() <= allowed).all()
        assert_close(normed, reference.rms_norm(added, weight, 1e-5) if following else added)


def test_a_norm_with_weights_of_float32_rounds_once():
    torch.manual_seed(fresh_seed())
    values, weight = torch.randn(40, 64).bfloat16(), 1 + 0.3 * torch.randn(64)
    exact = reference.rms_norm(values.float(), weight, 1e-6)
    for kernels in (reference, cpu_layers):
        normed = kernels.rms_norm(values, weight, 1e-6).float()
        assert ((normed - exact).abs() <= exact.abs() * 1.001 * 2**-8).all()
    twice = reference.rms_norm(values, weight.bfloat16(), 1e-6).float()
    assert ((twice - exact).abs() > exact.abs() * 1.001 * 2**-8).any()


@DTYPES
def test_heads_inside_a_fused_projection_are_normed_one_by_one(dtype):
    torch.manual_seed(fresh_seed())
    fused = torch.randn(5, 7, 40).to(dtype)
    weight = torch.rand(40).to(dtype)
    heads = fused[:, 2:5]
    assert_close(cpu_layers.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@DTYPES
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", [3, 16, 1536])
def test_gate_mul_agrees_with_the_reference(dtype, activation, size):
    torch.manual_seed(fresh_seed())
    gate_up = 20 * torch.randn(11, 2 * size).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = 1e20, -1e20
    expected = reference.gate_mul(gate_up.double(), activation).to(dtype)
    assert_close(cpu_layers.gate_mul(gate_up, activation), expected)


def test_clamped_gates_are_those_of_transformers():
    gate_up, module = 8 * torch.randn(30, 96), SimpleNamespace(limit=7.0, alpha=1.702)
    in_turns = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    expected = GptOssExperts._apply_gate(module, in_turns)
    torch.testing.assert_close(reference.gate_mul(gate_up, Activation.CLAMPED), expected)
    gate_up[3, 5] = gate_up[4, 80] = torch.nan
    found = cpu_layers.gate_mul(gate_up, Activation.CLAMPED)
    assert found.isnan().nonzero().tolist() == [[3, 5], [4, 32]]


@DTYPES
@pytest.mark.parametrize("head_size", [8, 40, 64, 128])
def test_rotation_and_write_agree_with_the_reference(dtype, head_size):
    torch.manual_seed(fresh_seed())
    fused = torch.randn(6, 9, head_size).to(dtype)
    query, key, value = fused.split([5, 2, 2], dim=1)
    angles = torch.randn(30, head_size)
    positions, slots = torch.randint(30, (6,)), torch.randperm(4 * 32)[:6]
    keys, values = torch.zeros(4, 2, 2, 32, head_size, dtype=dtype).unbind(1)
    expected = torch.zeros(2, 4, 2, 32, head_size, dtype=dtype)
    arguments = (query, key, value, angles, positions)
    rotated = cpu_cache.rotary_write_kv(*arguments, keys, values, slots)
    assert_close(rotated, reference.rotary_write_kv(*arguments, *expected, slots))
    assert_close(keys, as_panels(expected[0]))
    assert_close(values, expected[1])


@DTYPES
def test_a_write_stores_the_very_bits(dtype):
    torch.manual_seed(fresh_seed())
    key, value = torch.randn(2, 6, 2, 24).to(dtype)
    key[3, 1, 5] = torch.nan
    slots = torch.randperm(4 * 32)[:6]
    keys, values = torch.zeros(4, 2, 2, 32, 24, dtype=dtype).unbind(1)
    expected = torch.zeros(2, 4, 2, 32, 24, dtype=dtype)
    cpu_cache.write_kv(key, value, keys, values, slots)
    reference.write_kv(key, value, *expected, slots)
    for actual, wanted in ((keys, as_panels(expected[0])), (values, expected[1])):
        assert torch.equal(actual.contiguous().view(torch.uint8), wanted.view(torch.uint8))


@DTYPES
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    torch.manual_seed(fresh_seed())
    values, residual = torch.randn(2, 70, 576).to(dtype)
    weight = torch.rand(576).to(dtype)
    normed, added = cpu_layers.add_rms_norm(values, residual, weight, 1e-5)
    activation = random.choice(list(Activation))
    gated = cpu_layers.gate_mul(values, activation)
    for row in range(70):
        one = slice(row, row + 1)
        alone = cpu_layers.add_rms_norm(values[one], residual[one], weight, 1e-5)
        assert torch.equal(alone[0], normed[one])
        assert torch.equal(alone[1], added[one])
        assert torch.equal(cpu_layers.rms_norm(added[one], weight, 1e-5), normed[one])
        assert torch.equal(cpu_layers.gate_mul(values[one], activation), gated[one])


def test_types_that_are_not_compiled_go_to_the_reference():
    values = torch.randn(3, 32, dtype=torch.float64)
    weight = torch.rand(32, dtype=torch.float64)
    expected = reference.rms_norm(values, weight, 1e-5)
    assert torch.equal(cpu_layers.rms_norm(values, weight, 1e-5), expected)
    assert torch.equal(cpu_layers.gate_mul(values), reference.gate_mul(values))
