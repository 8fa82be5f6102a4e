"""What adapters add on a GPU, in Triton's interpreter."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import random

import torch

from pagefleet_kernels import reference
from pagefleet_kernels.triton_lora import HeldLoras, adapted
from tests.unit.kernels.lora_case import PARTS, random_adapters, random_loras
from tests.unit.kernels.paged_case import fresh_seed

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def seeded():
    seed = fresh_seed()
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.fixture(autouse=True)
def memory_that_nobody_wrote_is_poison():
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "inputs"), [("heads", 40), ("gates", 1100), ("one", 7)])
def test_what_is_added(name, inputs, dtype):
    parts = PARTS[name]
    loras = random_loras(parts, inputs, 3, dtype)
    held = HeldLoras(loras)
    for rows in (0, 1, 37):
        values, adapters = (
            torch.randn(rows, inputs + 5).to(dtype)[:, :inputs],
            random_adapters(3, rows),
        )
        before = torch.randn(rows, sum(parts)).to(dtype)
        expected = reference.lora(values.double(), adapters, loras, sum(parts)) + before
        found = before.clone()
        held.add(found, values, adapters)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=8 * tolerance)
        assert torch.equal(found[adapters == 0], before[adapters == 0])


def test_a_row_has_the_same_bits_in_every_batch_and_beside_any_adapters():
    loras = random_loras(PARTS["heads"], 70, 3, torch.float32)
    values, adapters = torch.randn(9, 70), random_adapters(3, 9)
    before = torch.randn(9, sum(PARTS["heads"]))
    together = before.clone()
    HeldLoras(loras).add(together, values, adapters)
    alone = before.clone()
    for row in range(9):
        if number := int(adapters[row]):
            one = slice(row, row + 1)
            if loras[number - 1]:
                held = HeldLoras([loras[number - 1]])
                held.add(alone[one], values[one], torch.ones(1, dtype=torch.int32))
    assert torch.equal(together, alone)


def test_a_row_that_is_no_number_harms_no_other():
    loras = random_loras(PARTS["one"], 40, 2, torch.float32)
    values, adapters = torch.randn(20, 40), torch.arange(20, dtype=torch.int32) % 3
    layer = adapted(lambda values, adapters=None: torch.zeros(len(values), 100), loras)
    expected = layer(values, adapters)
    values[4] = torch.nan
    found = layer(values, adapters)
    assert found[4].isnan().all()
    others = torch.arange(20) != 4
    assert torch.equal(found[others], expected[others])
    assert not layer(values).any()
