"""All layers of a decoder on the CPU, written down once as a program (`cpu_program`).

The stages are the kernels that are called one by one elsewhere, and so are the bits that come of
them. Between stages everything lies in buffers that the steps share. Where there are adapters there
is a second program, with what they add, for the steps that use one: they cost the others nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pagefleet_kernels import cpu_attention
from pagefleet_kernels.cpu_cache import is_kept
from pagefleet_kernels.cpu_experts import PackedExperts, Room
from pagefleet_kernels.cpu_grouped import blocks_size
from pagefleet_kernels.cpu_launch import FORMATS, address_of
from pagefleet_kernels.cpu_linear import PackedLinear
from pagefleet_kernels.cpu_lora import PackedLoras
from pagefleet_kernels.cpu_program import Program, Stage
from pagefleet_kernels.cpu_rows import PANEL
from pagefleet_kernels.layers import DecoderLayer, DenseMlp, Layer, StackShape
from pagefleet_kernels.quantized import GROUP

_STAGES_OF_ROWS = set(Stage) - {Stage.ROTARY, Stage.ATTENTION, Stage.GATES}
"""Those whose records have the number of rows."""


class LayerStack:
    """Runs all layers of a decoder over the tokens of a step."""

    def __init__(self, layers: Sequence[DecoderLayer], norm: Tensor, shape: StackShape) -> None:
        """`norm` follows the last layer."""
        self._layers, self._norm, self._shape = layers, norm, shape
        self._kv_scales: Tensor | None = None
        packed = [part for part in _parts(layers) if isinstance(part, PackedLinear)]
        self._gated_size = max((part.columns for part in packed if part.epilogue.gates), default=0)
        self._experts = [each.mlp for each in layers if isinstance(each.mlp, PackedExperts)]
        self._weights = packed[0].weights
        self._expert_weights = self._experts[0].gates.weights if self._experts else None
        loras = [part.loras for part in packed]
        self._inner_size = max((each.inner_size for each in loras if each is not None), default=0)
        self._write_down(capacity=16)

    def keep_kv_in_8_bits(self, scales: Tensor) -> None:
        """See `layers.Stack`."""
        self._kv_scales = scales
        self._write_down(self._capacity)

    def run(
        self,
        residual: Tensor,
        caches: Tensor,
        positions: Tensor,
        slots: Tensor,
        tables: Tensor,
        starts: Tensor,
        offsets: Tensor,
        adapters: Tensor | None,
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
        adapted = adapters is not None and self._inner_size > 0
        self._program = self._programs[adapted]
        self._bind_tokens(tokens, caches, positions, slots)
        self._bind_rows(threads, tables, starts, offsets)
        for stage in (Stage.LINEAR, Stage.SHRINK):
            self._program.records[stage]["adapters"] = address_of(adapters)
        self._program.rewind(threads)
        for first, last in self._program.sections:
            self._program.run(first, last)
            progress()
        return self._normed[:tokens]

    def _bind_tokens(self, tokens: int, caches: Tensor, positions: Tensor, slots: Tensor) -> None:
        records, itemsize = self._program.records, caches.element_size()
        for stage in _STAGES_OF_ROWS:
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
        """Make the buffers for `capacity` tokens, and the programs that use them."""
        shape, norm = self._shape, self._norm
        kv_dtype = shape.dtype if self._kv_scales is None else torch.uint8
        sizes = shape.head_size, shape.query_heads, shape.heads
        self._heads = cpu_attention.Shape.of(shape.dtype, kv_dtype, *sizes)
        self._capacity = capacity

        def buffer(width: int) -> Tensor:
            return torch.empty(capacity, width, dtype=shape.dtype)

        self._residual, self._normed = buffer(len(norm)), buffer(len(norm))
        self._projected = buffer(len(norm))
        self._qkv = buffer((shape.query_heads + 2 * shape.heads) * shape.head_size)
        self._query, self._attended = (buffer(shape.query_heads * shape.head_size) for _ in "qa")
        self._key = buffer(shape.heads * shape.head_size)
        self._gated, self._inner = buffer(self._gated_size), buffer(self._inner_size)
        widest = max(len(norm), self._query.shape[1], self._gated_size)
        self._blocks = torch.empty(capacity, blocks_size(widest), dtype=torch.uint8)
        self._rooms = [Room(each, capacity, shape.dtype) for each in self._experts[:1]]
        kinds = (False, True) if self._inner_size else (False,)
        self._programs = {adapted: self._write_program(adapted=adapted) for adapted in kinds}

    def _write_program(self, *, adapted: bool) -> Program:
        """All layers, with or without what adapters add."""
        norm, heads = self._norm, self._heads
        form, blocks = FORMATS[self._shape.dtype], (heads.narrow, heads.wide)
        self._program = Program(form, self._weights, *blocks, self._expert_weights)
        self._adapted = adapted
        first = self._layers[0].attention_norm
        if first is not None:
            self._add_norm(self._residual, first)
        following = [*(layer.attention_norm for layer in self._layers[1:]), norm]
        kept = [0] * len(following)
        if self._kv_scales is not None:
            kept = [scales.data_ptr() for scales in self._kv_scales]
        for layer, kv_scales, next_norm in zip(self._layers, kept, following, strict=True):
            self._add_attention(layer, kv_scales)
            self._add_linear(layer.output, self._attended, self._projected)
            self._add_sum(layer.mlp_norm, layer.post_attention_norm)
            self._add_mlp(layer.mlp, self._input(layer.mlp_norm))
            self._add_sum(next_norm, layer.post_mlp_norm)
            self._program.end_section()
        self._program.close()
        return self._program

    def _add_attention(self, layer: DecoderLayer, kv_scales: int) -> None:
        shape, heads = self._shape, self._heads
        itemsize, head_bytes = self._qkv.element_size(), shape.head_size * self._qkv.element_size()
        self._add_linear(layer.qkv, self._input(layer.attention_norm), self._qkv)
        query = self._qkv.data_ptr()
        key = query + shape.query_heads * head_bytes
        value, stride = key + shape.heads * head_bytes, self._qkv.stride(0) * itemsize
        sources = {"query": query, "query_stride": stride, "key": key, "key_stride": stride}
        if layer.query_norm is not None and layer.key_norm is not None:
            for name, weight, target in (
                ("query", layer.query_norm, self._query),
                ("key", layer.key_norm, self._key),
            ):
                self._program.add(
                    Stage.NORM,
                    parts=target.shape[1] // len(weight),
                    size=len(weight),
                    values=sources[name],
                    stride=stride,
                    output=target.data_ptr(),
                    **self._norm_by(weight),
                )
                sources[name] = target.data_ptr()
                sources[f"{name}_stride"] = target.stride(0) * itemsize
        self._program.add(
            Stage.ROTARY,
            rotated=self._query.data_ptr(),
            value=value,
            value_stride=stride,
            rotation=layer.rotation.data_ptr(),
            kv_scales=kv_scales,
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
            kv_scales=kv_scales,
            heads=shape.heads,
            group=heads.group,
            padded=heads.padded,
            tokens_per_task=heads.tokens_per_task,
            capacity=heads.capacity,
            window=layer.window,
            sinks=address_of(layer.sinks),
            room_size=heads.room_size,
            partial_size=heads.partial_size,
            scale=shape.scale,
            softcap=shape.softcap,
        )

    def _add_mlp(self, mlp: Layer, values: Tensor) -> None:
        if isinstance(mlp, PackedExperts):
            self._add_experts(mlp, values)
            return
        assert isinstance(mlp, DenseMlp)
        self._add_linear(mlp.gated, values, self._gated)
        self._add_linear(mlp.down, self._gated, self._projected)

    def _add_experts(self, experts: PackedExperts, values: Tensor) -> None:
        """All layers have experts of the same sizes, and so the same room."""
        program, (room,) = self._program, self._rooms
        program.add(Stage.ROUTER, **experts.score(room, values))
        program.add(Stage.ROUTE, **experts.route(room))
        program.add(Stage.SORT, **experts.sort(room))
        if experts.gates.weights.grouped:
            values = self._add_quantize(values, self._blocks)
        program.add(Stage.GATES, **experts.gate(room, values))
        inner = room.inner
        if experts.sums.weights.grouped:  # the slots of a row lie one after another
            slots, blocks = (each.view(self._capacity, -1) for each in (inner, room.blocks))
            self._add_quantize(slots, blocks)
            inner = room.blocks
        program.add(Stage.SUMS, **experts.add_up(room, inner, self._projected))

    def _add_linear(self, layer: Layer, values: Tensor, output: Tensor) -> None:
        assert isinstance(layer, PackedLinear)
        added = {}
        if self._adapted and layer.loras is not None:
            added = self._add_shrink(layer.loras, values)
        if layer.weights.grouped:
            values = self._add_quantize(values, self._blocks)
        self._program.add(
            Stage.LINEAR,
            values=values.data_ptr(),
            stride=values.stride(0) * values.element_size(),
            output=output.data_ptr(),
            output_stride=output.stride(0) * output.element_size(),
            **layer.arguments(),
            **added,
        )

    def _add_shrink(self, loras: PackedLoras, values: Tensor) -> dict[str, int]:
        """Rows between the factors of their adapters, until the next are shrunk; what the linear
        layer is told of them.
        """
        inner = self._inner
        shared = {
            "loras": loras.table,
            "inner": inner.data_ptr(),
            "inner_stride": inner.stride(0) * inner.element_size(),
        }
        self._program.add(
            Stage.SHRINK,
            values=values.data_ptr(),
            stride=values.stride(0) * values.element_size(),
            steps=loras.steps,
            panels=loras.panels,
            **shared,
        )
        return shared

    def _add_quantize(self, values: Tensor, blocks: Tensor) -> Tensor:
        """Rows in blocks, until the next are quantized there."""
        self._program.add(
            Stage.QUANTIZE,
            groups=values.shape[1] // GROUP,
            values=values.data_ptr(),
            stride=values.stride(0) * values.element_size(),
            output=blocks.data_ptr(),
            output_stride=blocks.stride(0),
        )
        return blocks

    def _input(self, norm: Tensor | None) -> Tensor:
        """What a part of a layer reads that has this norm before it."""
        return self._residual if norm is None else self._normed

    def _add_norm(self, values: Tensor, weight: Tensor) -> None:
        self._program.add(Stage.NORM, **self._vectors(values), **self._norm_by(weight))

    def _add_sum(self, weight: Tensor | None, post: Tensor | None) -> None:
        """What was projected comes to the residual in place; see `reference.add_rms_norm`."""
        residual = self._residual.data_ptr()
        self._program.add(
            Stage.NORM,
            residual=residual,
            added=residual,
            factor=self._shape.factor,
            **self._vectors(self._projected),
            **self._norm_by(weight, post),
        )

    def _vectors(self, values: Tensor) -> dict[str, int]:
        return {
            "parts": 1,
            "size": values.shape[1],
            "values": values.data_ptr(),
            "stride": values.stride(0) * values.element_size(),
            "output": self._normed.data_ptr(),
        }

    def _norm_by(self, weight: Tensor | None, post: Tensor | None = None) -> dict[str, float]:
        """The fields of a norm's weights."""
        weights = {"weight": weight, "post": post}
        places = {name: each.data_ptr() for name, each in weights.items() if each is not None}
        dtypes = {each.dtype for each in weights.values() if each is not None}
        wide = bool(dtypes - {self._shape.dtype})
        return {"wide": wide, "eps": self._shape.eps, **places}


def stack(layers: Sequence[DecoderLayer], norm: Tensor, shape: StackShape) -> LayerStack | None:
    """All layers as one; None unless every linear layer is packed, all alike, and so are all
    experts, and heads can be compiled. Layers with latents are called one by one.
    """
    parts = _parts(layers)
    experts = [part for part in parts if isinstance(part, PackedExperts)]
    linear = [part for part in parts if isinstance(part, PackedLinear)]
    alike = (
        len({part.weights for part in linear}) == 1
        and len({each.weights for part in experts for each in (part.gates, part.sums)}) <= 1
    )
    latents = any(layer.latents is not None for layer in layers)
    if not alike or len(parts) > len(experts) + len(linear) or latents:
        return None
    return LayerStack(layers, norm, shape) if is_kept(shape.dtype, shape.head_size) else None


def _parts(layers: Sequence[DecoderLayer]) -> list[Layer]:
    """All linear layers, or what is in the place of some."""
    parts: list[Layer] = []
    for layer in layers:
        mlp = [layer.mlp.gated, layer.mlp.down] if isinstance(layer.mlp, DenseMlp) else [layer.mlp]
        parts += [layer.qkv, layer.output, *mlp]
    return parts
