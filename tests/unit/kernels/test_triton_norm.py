"""Triton's normalization and activation in Triton's interpreter, against float64."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch
from torch.nn import functional

from pagefleet_kernels.layers import Activation
from pagefleet_kernels.triton_activation import gate_mul
from pagefleet_kernels.triton_norm import add_rms_norm, rms_norm
from tests.unit.kernels.paged_case import fresh_seed

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(output, expected, dtype):
    """The interpreter rounds to bfloat16 towards zero, hence up to twice the error of a GPU."""
    torch.testing.assert_close(
        output.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 576), (1, 1), (2, 4096), (5, 3, 80), (0, 64)])
def test_rms_norm(shape, dtype):
    torch.manual_seed(fresh_seed())
    values = (torch.randn(*shape[:-1], shape[-1] + 7) * 3).to(dtype)[..., : shape[-1]]
    weight = torch.rand(shape[-1]).to(dtype)
    expected = functional.rms_norm(values.double(), shape[-1:], weight.double(), 1e-5)
    close(rms_norm(values, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 576), (2, 3000)])
def test_add_rms_norm(shape, dtype):
    torch.manual_seed(fresh_seed())
    values, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.rand(shape[-1]).to(dtype)
    normed, added = add_rms_norm(values, residual, weight, 1e-6)
    close(added, values.double() + residual.double(), dtype)
    expected = functional.rms_norm(added.double(), shape[-1:], weight.double(), 1e-6)
    close(normed, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("following", [False, True])
def test_norms_of_what_is_added(dtype, wide, following):
    torch.manual_seed(fresh_seed())
    values, residual = torch.randn(2, 3, 576).to(dtype)
    weight, post = (1 + 0.2 * torch.randn(2, 576)).to(torch.float32 if wide else dtype)
    for factor, kind in ((1.0, post), (0.22, None), (0.22, post)):
        arguments = weight if following else None, 1e-6, kind, factor
        normed, added = add_rms_norm(values, residual, *arguments)
        expected = values.double() * factor
        if kind is not None:
            expected = functional.rms_norm(values.double(), (576,), post.double(), 1e-6) * factor
        tolerance = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            added.double(), residual.double() + expected, rtol=tolerance, atol=tolerance
        )
        if following:
            close(normed, functional.rms_norm(added.double(), (576,), weight.double(), 1e-6), dtype)
        else:
            assert normed is added


def test_a_line_has_the_same_bits_in_every_batch():
    values, weight = torch.randn(4, 576), torch.rand(576)
    together = rms_norm(values, weight, 1e-5)
    for line in range(4):
        assert torch.equal(rms_norm(values[line : line + 1], weight, 1e-5)[0], together[line])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1536), (1, 2), (2, 4100), (0, 64)])
def test_gate_mul(shape, dtype):
    torch.manual_seed(fresh_seed())
    gate_up = (torch.randn(shape) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(gate_mul(gate_up), functional.silu(gate) * up, dtype)
    activated = functional.gelu(gate, approximate="tanh") * up
    close(gate_mul(gate_up, Activation.GELU_TANH), activated, dtype)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    activated = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    close(gate_mul(gate_up, Activation.CLAMPED), activated, dtype)
