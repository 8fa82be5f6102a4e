"""Triton's row-invariant product and log-softmax in Triton's interpreter."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch

from pagefleet_kernels.triton_logprobs import log_softmax
from pagefleet_kernels.triton_matmul import product
from tests.unit.kernels.paged_case import fresh_seed

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 96), (65, 100, 33), (130, 7, 1), (0, 64, 64)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_product(rows, inputs, outputs, biased, dtype):
    torch.manual_seed(fresh_seed())
    values = torch.randn(rows, inputs + 5).to(dtype)[:, :inputs]
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    expected = values.double() @ weight.double().T + (bias.double() if biased else 0)
    found = product(values, weight, bias if biased else None)
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=8 * tolerance)


def test_a_row_of_a_product_has_the_same_bits_in_every_batch():
    torch.manual_seed(fresh_seed())
    values, weight = torch.randn(150, 200), torch.randn(70, 200)
    together = product(values, weight)
    for first, last in ((0, 1), (149, 150), (20, 90), (63, 66)):
        assert torch.equal(product(values[first:last], weight), together[first:last])


@pytest.mark.parametrize("vocabulary", [1, 500, 2048, 5000])
def test_log_softmax(vocabulary):
    torch.manual_seed(fresh_seed())
    logits = torch.randn(3, vocabulary) * 5
    if vocabulary > 2:
        logits[0, 1] = -torch.inf
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(log_softmax(logits).double(), expected, rtol=1e-5, atol=1e-5)
    for row in range(3):
        assert torch.equal(log_softmax(logits[row : row + 1])[0], log_softmax(logits)[row])


def test_a_broken_row_has_no_logarithms():
    logits = torch.randn(2, 3000)
    logits[1, 2500] = torch.nan
    found = log_softmax(logits)
    assert found[1].isnan().all()
    assert not found[0].isnan().any()
