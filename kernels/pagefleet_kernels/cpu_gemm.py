"""The inner loop of matrix products on the CPU: a tile of rows times a panel of a packed weight.

A panel holds PANEL outputs. What is needed together lies together in it: for each input (in
bfloat16 for each pair of inputs) one number (one pair) of every output. A tile of up to TILE_ROWS
rows goes through a panel from the first input to the last with all its sums in registers; a number
of the weight is loaded once for all rows, and an input is spread over the lanes (Goto and van de
Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3), 2008, section 4). Where
registers are fewer, rows take turns at each stretch of a panel, which stays in the cache meanwhile.

So each output is a chain of multiply-adds in the order of the inputs, in a lane of its own: the
rows beside it cannot change a bit of it. In float32 the chain is cut into stretches, whose sums are
added up, because rounding errors grow with the length of a chain (Higham, "The accuracy of floating
point summation", SIAM J. Sci. Comput. 14(4), 1993). A step of the chain in bfloat16 takes two
inputs, by VDPBF16PS where the processor has it, else by two multiply-adds of the widened numbers;
there the rounding of the inputs outweighs that of the sums, which are float32.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_grouped import Weights, emit_grouped_product
from pagefleet_kernels.cpu_ir import (
    INTS,
    LANES,
    VECTOR,
    Format,
    at,
    floats,
    intrinsic,
    load,
    multiply_add_words,
    passes,
    splat,
    store,
)

TILE_ROWS = 12
"""As many as leave registers of AVX-512 for the weights and an input."""

PANEL_VECTORS = 2
PANEL = PANEL_VECTORS * LANES
"""Outputs of a panel."""

_STRETCH = 128
"""Inputs of a chain in float32."""

_VECTOR_BYTES = LANES * 4
_WORD = types.int64
_INT64 = ir.IntType(64)


def _emit_product(
    builder: Any,
    form: Format,
    vectors: int,
    rows: list[Any],
    panel: Any,
    steps: Any,
    sums: Any,
) -> None:
    """The loops over the inputs for rows at some addresses; `steps` is at least 1."""
    places = [at(builder, sums, number * _VECTOR_BYTES) for number in range(len(rows) * vectors)]
    parts = [
        (rows[part], places[part.start * vectors : part.stop * vectors])
        for part in passes(len(rows), vectors)
    ]
    if form is not Format.FLOAT32:
        for some, targets in parts:
            stretch = _emit_stretch(builder, form, vectors, some, panel, _INT64(0), steps)
            for total, place in zip(stretch, targets, strict=True):
                store(builder, total, place)
        return
    for place in places:
        store(builder, floats(0.0), place)
    before = builder.block
    body = builder.append_basic_block("stretch")
    after = builder.append_basic_block("stretches")
    builder.branch(body)
    builder.position_at_end(body)
    begin = builder.phi(_INT64)
    following = builder.add(begin, _INT64(_STRETCH))
    more = builder.icmp_signed("<", following, steps)
    end = builder.select(more, following, steps)
    for some, targets in parts:
        stretch = _emit_stretch(builder, form, vectors, some, panel, begin, end)
        for total, place in zip(stretch, targets, strict=True):
            store(builder, builder.fadd(load(builder, place), total), place)
    begin.add_incoming(_INT64(0), before)
    begin.add_incoming(following, builder.block)
    builder.cbranch(more, body, after)
    builder.position_at_end(after)


def _emit_stretch(
    builder: Any,
    form: Format,
    vectors: int,
    rows: list[Any],
    panel: Any,
    begin: Any,
    end: Any,
) -> list[Any]:
    """Sums over the inputs `begin` .. `end` - 1, of which there is one at least."""
    before = builder.block
    body = builder.append_basic_block("inputs")
    after = builder.append_basic_block("summed")
    step_type = VECTOR if form is Format.FLOAT32 else INTS
    builder.branch(body)
    builder.position_at_end(body)
    step = builder.phi(_INT64)
    totals = [builder.phi(VECTOR) for _ in range(len(rows) * vectors)]
    place = builder.add(panel, builder.mul(step, _INT64(vectors * _VECTOR_BYTES)))
    weights = [
        load(builder, at(builder, place, vector * _VECTOR_BYTES), step_type)
        for vector in range(vectors)
    ]
    offset = builder.mul(step, _INT64(4))
    grown = []
    for row, source in enumerate(rows):
        scalar = load(builder, builder.add(source, offset), step_type.element)
        spread = splat(builder, scalar)
        for vector, weight in enumerate(weights):
            total = totals[row * vectors + vector]
            grown.append(multiply_add_words(builder, form, spread, weight, total))
    following = builder.add(step, _INT64(1))
    step.add_incoming(begin, before)
    step.add_incoming(following, body)
    for total, sum_ in zip(totals, grown, strict=True):
        total.add_incoming(floats(0.0), before)
        total.add_incoming(sum_, body)
    builder.cbranch(builder.icmp_signed("<", following, end), body, after)
    builder.position_at_end(after)
    return grown


@intrinsic
def product(
    typing: Any,
    form: Any,
    weights: Any,
    rows: Any,
    values: Any,
    stride: Any,
    panel: Any,
    steps: Any,
    sums: Any,
) -> Any:
    """Rows times one panel.

    Args:
        form: of the values, and of plain weights.
        weights: how they are packed; if they are grouped, the values are quantized.
        rows: how many, at most `TILE_ROWS`; 0 does nothing.
        values: address of the first row; each begins on a boundary of its numbers.
        stride: bytes from one row to the next.
        panel: address of the panel.
        steps: inputs in float32, pairs of inputs in bfloat16; groups if there are any.
        sums: address of float32 [rows, PANEL], which are written.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, rows, values, stride, *others = arguments

        def emit(count: int) -> None:
            places = _rows_at(builder, values, stride, count)
            _emit_panel(builder, form.value, weights.value, places, *others)

        _emit_counts(builder, rows, emit)
        return context.get_dummy_value()

    return types.void(form, weights, *([_WORD] * 6)), lower


@intrinsic
def scattered_product(
    typing: Any,
    form: Any,
    weights: Any,
    rows: Any,
    values: Any,
    stride: Any,
    numbers: Any,
    panel: Any,
    steps: Any,
    sums: Any,
) -> Any:
    """`product` with rows anywhere; `numbers` is the address of int64 [rows], which ones."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, rows, values, stride, numbers, *others = arguments

        def emit(count: int) -> None:
            places = [
                builder.add(values, builder.mul(stride, load(builder, number, _INT64)))
                for number in _rows_at(builder, numbers, _INT64(8), count)
            ]
            _emit_panel(builder, form.value, weights.value, places, *others)

        _emit_counts(builder, rows, emit)
        return context.get_dummy_value()

    return types.void(form, weights, *([_WORD] * 7)), lower


@intrinsic
def narrow_product(
    typing: Any,
    form: Any,
    rows: Any,
    values: Any,
    stride: Any,
    panel: Any,
    steps: Any,
    sums: Any,
) -> Any:
    """`product` with a plain panel of LANES outputs; the sums are float32 [rows, LANES]."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, rows, values, stride, *others = arguments

        def emit(count: int) -> None:
            places = _rows_at(builder, values, stride, count)
            _emit_product(builder, form.value, 1, places, *others)

        _emit_counts(builder, rows, emit)
        return context.get_dummy_value()

    return types.void(form, *([_WORD] * 6)), lower


def _rows_at(builder: Any, values: Any, stride: Any, count: int) -> list[Any]:
    """The addresses of rows that lie one after another."""
    return [builder.add(values, builder.mul(stride, _INT64(row))) for row in range(count)]


def _emit_panel(
    builder: Any, form: Format, weights: Weights, rows: list[Any], panel: Any, steps: Any, sums: Any
) -> None:
    if weights.grouped:
        emit_grouped_product(builder, weights, PANEL_VECTORS, rows, panel, steps, sums)
    else:
        _emit_product(builder, form, PANEL_VECTORS, rows, panel, steps, sums)


def _emit_counts(builder: Any, rows: Any, emit: Callable[[int], None]) -> None:
    """A case for each number of rows up to TILE_ROWS; of 0 there is none."""
    done = builder.append_basic_block("multiplied")
    switch = builder.switch(rows, done)
    for count in range(1, TILE_ROWS + 1):
        block = builder.append_basic_block(f"rows_{count}")
        switch.add_case(_INT64(count), block)
        builder.position_at_end(block)
        emit(count)
        builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def sums_of_a_tile(typing: Any) -> Any:
    """Address of room for float32 [TILE_ROWS, PANEL] on the stack of the calling thread, one for
    each place where it is asked for.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        room = cgutils.alloca_once(builder, VECTOR, size=TILE_ROWS * PANEL_VECTORS)
        return builder.ptrtoint(room, _INT64)

    return _WORD(), lower
