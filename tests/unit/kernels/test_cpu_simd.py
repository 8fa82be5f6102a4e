"""The instructions that kernels are made of, one by one."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba import types

from pagefleet_kernels import cpu_ir
from pagefleet_kernels.cpu_ir import Format
from pagefleet_kernels.cpu_simd import (
    exp,
    largest,
    load_floats,
    maximum,
    store_float,
    store_floats,
    store_words,
)
from tests.unit.kernels.paged_case import as_panels, fresh_seed


def each_vector(instruction: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Applies an instruction to all lanes of a float32 tensor whose size is a multiple of 16."""

    @numba.njit
    def run(source, target, size):
        for place in range(0, size, 64):
            store_floats(target + place, instruction(load_floats(source + place)))

    def apply(values: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(values)
        run(values.data_ptr(), result.data_ptr(), values.nbytes)
        return result

    return apply


def test_powers_of_e_are_within_two_units_in_the_last_place():
    torch.manual_seed(fresh_seed())
    values = torch.cat([torch.empty(1 << 16).uniform_(-87, 88), torch.linspace(-1, 1, 1 << 12)])
    powers = each_vector(exp)(values)
    exact = values.double().exp()
    unit = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    assert ((powers.double() - exact).abs() / unit).max() <= 2


def test_powers_of_e_at_the_ends():
    infinity, nan = torch.inf, torch.nan
    values = torch.tensor([-infinity, -1e30, -87.1, 0, 88, 89, 1e30, infinity, nan, -nan] + 6 * [1])
    odd = torch.tensor([0x7F800001, 0x7FC00FFF, -1], dtype=torch.int32).view(torch.float32)
    values[10:13] = odd
    powers = each_vector(exp)(values)
    assert powers[:4].tolist() == [0, 0, 0, 1]
    assert powers[4:8].tolist() == 4 * [powers[4].item()]
    assert powers[4].isfinite()
    assert powers[8:13].isnan().all()


def test_the_largest_lane():
    @numba.njit
    def run(source, target):
        store_float(target, largest(load_floats(source)))

    torch.manual_seed(fresh_seed())
    for lane in range(16):
        values = torch.randn(16)
        values[lane] = 10 + torch.rand(1).item()
        found = torch.zeros(1)
        run(values.data_ptr(), found.data_ptr())
        assert found == values[lane]


def test_a_maximum_with_nan_is_the_second():
    @numba.njit
    def run(first, second, target):
        store_floats(target, maximum(load_floats(first), load_floats(second)))

    first, second, found = torch.randn(3, 16)
    first[::3] = torch.nan
    run(first.data_ptr(), second.data_ptr(), found.data_ptr())
    assert torch.equal(found, torch.where(first > second, first, second))


@pytest.mark.parametrize("count", [2, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_words_of_a_key_go_to_their_lane_of_a_panel(dtype, count):
    form = Format.FLOAT32 if dtype == torch.float32 else Format.BFLOAT16

    @numba.njit
    def run(source, target, count):
        store_words(form, target, load_floats(source), count)

    torch.manual_seed(fresh_seed())
    key = torch.randn(16)
    panel, rows = torch.zeros(2, 1, 1, 16, 16, dtype=dtype)
    lane = int(torch.randint(16, (1,)))
    run(key.data_ptr(), panel.data_ptr() + 4 * lane, count)
    rows[0, 0, lane, :count] = key[:count].to(dtype)
    assert torch.equal(panel, as_panels(rows))


@pytest.mark.parametrize("native", [True, False], ids=["native", "widened"])
@pytest.mark.parametrize("form", [Format.FLOAT32, Format.BFLOAT16], ids=str)
def test_words_are_multiplied_and_added(form, native, monkeypatch):
    """On processors that multiply bfloat16, and as on all others."""
    if native and form is Format.BFLOAT16 and not cpu_ir.MULTIPLIES_BFLOAT16:
        pytest.skip("this processor cannot")
    monkeypatch.setattr(cpu_ir, "MULTIPLIES_BFLOAT16", native)
    kind = cpu_ir.VECTOR if form is Format.FLOAT32 else cpu_ir.INTS

    @cpu_ir.intrinsic
    def multiply_add_words(typing, left, right, total):
        def lower(context, builder, signature, arguments):
            words = [cpu_ir.load(builder, address, kind) for address in arguments[:2]]
            before = cpu_ir.load(builder, arguments[2])
            after = cpu_ir.multiply_add_words(builder, form, *words, before)
            cpu_ir.store(builder, after, arguments[2])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), lower

    @numba.njit
    def run(left, right, total):
        multiply_add_words(left, right, total)

    torch.manual_seed(fresh_seed())
    dtype = torch.float32 if form is Format.FLOAT32 else torch.bfloat16
    left, right = torch.randn(2, 16, 4 // form.itemsize).to(dtype)
    total = torch.randn(16)
    expected = total.double() + (left.double() * right.double()).sum(1)
    run(left.data_ptr(), right.data_ptr(), total.data_ptr())
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [True, False], ids=["native", "shifted"])
def test_float16_is_widened_exactly(native, monkeypatch):
    """On processors that do it, and as on all others."""
    if native and not cpu_ir.WIDENS_FLOAT16:
        pytest.skip("this processor cannot")
    monkeypatch.setattr(cpu_ir, "WIDENS_FLOAT16", native)

    @cpu_ir.intrinsic
    def widen(typing, source, target):
        def lower(context, builder, signature, arguments):
            source, target = arguments
            halves = cpu_ir.load(builder, source, cpu_ir.HALVES)
            cpu_ir.store(builder, cpu_ir.widen_float16(builder, halves), target)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), lower

    @numba.njit
    def run(source, target, count):
        for number in range(0, count, 16):
            widen(source + number * 2, target + number * 4)

    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    finite = numbers[numbers.isfinite()]
    found = torch.zeros(len(finite))
    run(finite.data_ptr(), found.data_ptr(), len(finite))
    assert torch.equal(found.view(torch.int32), finite.float().view(torch.int32))
