"""All layers of a decoder on the CPU, written down once as a program (`cpu_program`).

The stages are the kernels that are called one by one elsewhere, and so are the bits that come of
them. Between stages everything lies in buffers that the steps share.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pagefleet_kernels import cpu_attention
from pagefleet_kernels.cpu_cache import has_panels
from pagefleet_kernels.cpu_grouped import BLOCK_BYTES
from pagefleet_kernels.cpu_launch import FORMATS
from pagefleet_kernels.cpu_linear import PackedLinear
from pagefleet_kernels.cpu_program import Program, Stage
from pagefleet_kernels.cpu_rows import PANEL
from pagefleet_kernels.layers import DecoderLayer, Layer, StackShape
from pagefleet_kernels.quantized import GROUP


class LayerStack:
    """Runs all layers of a decoder over the tokens of a step."""

    def __init__(
        self, layers: Sequence[DecoderLayer], norm: Tensor, cos_sin: Tensor, shape: StackShape
    ) -> None:
        """`norm` follows the last layer; `cos_sin` is that of `reference.rotary_write_kv`."""
        self._layers, self._norm, self._cos_sin, self._shape = layers, norm, cos_sin, shape
        self._heads = cpu_attention.Shape.of(
            norm.dtype, shape.head_size, shape.query_heads, shape.heads
        )
        gated = layers[0].gated
        assert isinstance(gated, PackedLinear)
        self._gated_size, self._weights = gated.columns, gated.weights
        self._write_down(capacity=16)

    def run(
        self,
        residual: Tensor,
        caches: Tensor,
        positions: Tensor,
        slots: Tensor,
        tables: Tensor,
        starts: Tensor,
        offsets: Tensor,
        progress: Callable[[], None],
    ) -> Tensor:
        """See `layers.Stack`.

        Raises:
            ValueError: blocks do not hold whole panels of keys.
        """
        if caches.shape[4] % PANEL:
            raise ValueError(f"Blocks must hold a multiple of {PANEL} tokens.")
        tokens, threads = len(residual), torch.get_num_threads()
        if tokens > self._capacity:
            self._write_down(capacity=max(tokens, 2 * self._capacity))
        self._residual[:tokens] = residual
        self._bind_tokens(tokens, caches, positions, slots)
        self._bind_rows(threads, tables, starts, offsets)
        self._program.rewind(threads)
        for first, last in zip(self._borders, self._borders[1:], strict=False):
            self._program.run(first, last)
            progress()
        return self._normed[:tokens]

    def _bind_tokens(self, tokens: int, caches: Tensor, positions: Tensor, slots: Tensor) -> None:
        records, itemsize = self._program.records, caches.element_size()
        for stage in (Stage.LINEAR, Stage.NORM, Stage.QUANTIZE):
            records[stage]["rows"] = tokens
        rotary, attention = records[Stage.ROTARY], records[Stage.ATTENTION]
        rotary["tokens"] = tokens
        rotary["positions"], rotary["slots"] = positions.data_ptr(), slots.data_ptr()
        layer_bytes = caches.stride(0) * itemsize
        keys = caches.data_ptr() + np.arange(len(caches)) * layer_bytes
        for record in (rotary, attention):
            record["keys"], record["values"] = keys, keys + caches.stride(1) * itemsize
            record["block_bytes"] = caches.stride(2) * itemsize
            record["block_size"] = caches.shape[4]

    def _bind_rows(self, threads: int, tables: Tensor, starts: Tensor, offsets: Tensor) -> None:
        attention = self._program.records[Stage.ATTENTION]
        rows, width = tables.shape
        places = self._heads.scratch(threads, rows, width * int(attention["block_size"][0]))
        attention["rooms"], attention["partials"], attention["arrivals"] = places
        attention["tables"], attention["table_stride"] = tables.data_ptr(), tables.stride(0) * 4
        attention["starts"], attention["offsets"] = starts.data_ptr(), offsets.data_ptr()
        attention["rows"] = rows

    def _write_down(self, capacity: int) -> None:
        """Make the buffers for `capacity` tokens, and the program that uses them."""
        shape, norm = self._shape, self._norm
        self._capacity = capacity

        def buffer(width: int) -> Tensor:
            return torch.empty(capacity, width, dtype=norm.dtype)

        self._residual, self._normed = buffer(len(norm)), buffer(len(norm))
        self._projected = buffer(len(norm))
        self._qkv = buffer((shape.query_heads + 2 * shape.heads) * shape.head_size)
        self._query, self._attended = (buffer(shape.query_heads * shape.head_size) for _ in "qa")
        self._key = buffer(shape.heads * shape.head_size)
        self._gated = buffer(self._gated_size)
        widest = max(len(norm), self._query.shape[1], self._gated_size)
        self._blocks = torch.empty(capacity, widest // GROUP * BLOCK_BYTES, dtype=torch.uint8)
        form, heads = FORMATS[norm.dtype], self._heads
        self._program = Program(form, self._weights, heads.narrow, heads.wide)
        self._borders = [0]
        self._add_norm(self._residual, self._layers[0].attention_norm, self._normed)
        following = [*(layer.attention_norm for layer in self._layers[1:]), norm]
        for layer, window, next_norm in zip(self._layers, shape.windows, following, strict=True):
            self._add_attention(layer, window)
            self._add_linear(layer.output, self._attended, self._projected)
            self._add_norm(self._projected, layer.mlp_norm, self._normed, self._residual)
            self._add_linear(layer.gated, self._normed, self._gated)
            self._add_linear(layer.down, self._gated, self._projected)
            self._add_norm(self._projected, next_norm, self._normed, self._residual)
            self._borders.append(len(self._program))
        self._program.close()

    def _add_attention(self, layer: DecoderLayer, window: int) -> None:
        shape, heads = self._shape, self._heads
        itemsize, head_bytes = self._qkv.element_size(), shape.head_size * self._qkv.element_size()
        self._add_linear(layer.qkv, self._normed, self._qkv)
        query = self._qkv.data_ptr()
        key = query + shape.query_heads * head_bytes
        value, stride = key + shape.heads * head_bytes, self._qkv.stride(0) * itemsize
        sources = {"query": query, "query_stride": stride, "key": key, "key_stride": stride}
        if layer.query_norm is not None and layer.key_norm is not None:
            for name, weight, parts, target in (
                ("query", layer.query_norm, shape.query_heads, self._query),
                ("key", layer.key_norm, shape.heads, self._key),
            ):
                self._program.add(
                    Stage.NORM,
                    parts=parts,
                    size=shape.head_size,
                    values=sources[name],
                    stride=stride,
                    weight=weight.data_ptr(),
                    output=target.data_ptr(),
                    eps=shape.eps,
                )
                sources[name] = target.data_ptr()
                sources[f"{name}_stride"] = target.stride(0) * itemsize
        self._program.add(
            Stage.ROTARY,
            rotated=self._query.data_ptr(),
            value=value,
            value_stride=stride,
            rotation=self._cos_sin.data_ptr(),
            query_heads=shape.query_heads,
            heads=shape.heads,
            head_size=shape.head_size,
            **sources,
        )
        self._program.add(
            Stage.ATTENTION,
            query=self._query.data_ptr(),
            query_stride=self._query.stride(0) * itemsize,
            output=self._attended.data_ptr(),
            heads=shape.heads,
            group=heads.group,
            padded=heads.padded,
            tokens_per_task=heads.tokens_per_task,
            capacity=heads.capacity,
            window=window,
            room_size=heads.room_size,
            partial_size=heads.partial_size,
            scale=shape.head_size**-0.5,
        )

    def _add_linear(self, layer: Layer, values: Tensor, output: Tensor) -> None:
        assert isinstance(layer, PackedLinear)
        if layer.weights.grouped:
            values = self._add_quantize(values)
        self._program.add(
            Stage.LINEAR,
            values=values.data_ptr(),
            stride=values.stride(0) * values.element_size(),
            output=output.data_ptr(),
            output_stride=output.stride(0) * output.element_size(),
            **layer.arguments(),
        )

    def _add_quantize(self, values: Tensor) -> Tensor:
        """Rows in blocks, until the next are quantized."""
        self._program.add(
            Stage.QUANTIZE,
            groups=values.shape[1] // GROUP,
            values=values.data_ptr(),
            stride=values.stride(0) * values.element_size(),
            output=self._blocks.data_ptr(),
            output_stride=self._blocks.stride(0),
        )
        return self._blocks

    def _add_norm(
        self, values: Tensor, weight: Tensor, output: Tensor, residual: Tensor | None = None
    ) -> None:
        """A norm, after a sum in place if there is a residual."""
        place = 0 if residual is None else residual.data_ptr()
        self._program.add(
            Stage.NORM,
            parts=1,
            size=values.shape[1],
            values=values.data_ptr(),
            stride=values.stride(0) * values.element_size(),
            residual=place,
            added=place,
            weight=weight.data_ptr(),
            output=output.data_ptr(),
            eps=self._shape.eps,
        )


def stack(
    layers: Sequence[DecoderLayer], norm: Tensor, cos_sin: Tensor, shape: StackShape
) -> LayerStack | None:
    """All layers as one; None unless every linear layer is packed, all alike, and heads can be
    compiled.
    """
    linear = [
        part for layer in layers for part in (layer.qkv, layer.output, layer.gated, layer.down)
    ]
    kinds = {part.weights if isinstance(part, PackedLinear) else None for part in linear}
    if None in kinds or len(kinds) > 1 or not has_panels(norm.dtype, shape.head_size):
        return None
    return LayerStack(layers, norm, cos_sin, shape)
