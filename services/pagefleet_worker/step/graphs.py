"""Decode steps as CUDA graphs: what Python orders kernel by kernel is recorded once, and replayed.

A graph is captured for each of a few sizes, the largest first, so that all share one pool of
memory. A graph of size n computes n tokens of n rows, however they are dealt out: a step of n
tokens, some of them drafts behind others of their rows, has fewer rows, and the rest are empty. A
step is padded to the next size by rows of one token. A graph reads its rows from one buffer at a
fixed address, which each step fills by one copy from the host; the copy waits, in the stream, for
the graph that read it last. Nothing in a graph depends on a content: grids follow the sizes, and
lengths are read on the device.

Steps of more tokens, and those with a longer part of a prompt, whose attention wants other tiles,
are ordered kernel by kernel.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.device_slots import DeviceSlots, pack_rows
from pagefleet_worker.paging.slots import Row
from pagefleet_worker.paging.transfer import fill

Run: TypeAlias = Callable[[], Tensor]
Capture: TypeAlias = Callable[[Run], Run]
"""Makes of work on fixed addresses something that does it again, with an output that stays where
it is."""


LONGEST_ROW = 16
"""Tokens that a row of such a step has, at most: one, and the drafts behind it."""

LEAST = 8 * LONGEST_ROW
"""Tokens of the largest graph, at least: few rows have the most drafts."""


def graph_sizes(most: int) -> list[int]:
    """Sizes to capture for up to `most` tokens: no batch is padded by more than a half, and no
    large one by more than 16 tokens.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most, 16)]
    return [*(size for size in sizes if size < most), most]


class CudaCapture:
    """Captures work on the current GPU as CUDA graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        """`run` is done once before it is captured, on the same stream: compilers and libraries set
        themselves up for each.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = run()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class DecodeGraphs:
    """The forward pass of decode steps, captured for `sizes`.

    Args:
        forward: computes the hidden states of a batch.
        slots: the tables that batches read.
        sizes: ascending.
        capture: `CudaCapture`, or what does the same without a GPU.
        adapted: whether there are LoRA adapters: steps that use one have graphs of their own.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        slots: DeviceSlots,
        sizes: Sequence[int],
        capture: Capture,
        *,
        adapted: bool = False,
    ) -> None:
        self._slots = slots
        self._sizes = list(sizes)
        packed = torch.from_numpy(pack_rows([], slots.padding, sizes[-1], adapted=adapted))
        self._rows = packed.to(slots.tables.device)
        self._runs: dict[tuple[int, bool], Run] = {}
        for size in reversed(self._sizes):
            for kind in (False, True)[: 1 + adapted]:
                self._fill([], size, adapted=kind)
                self._runs[size, kind] = capture(self._run_of(size, forward, adapted=kind))

    def hidden(self, rows: Sequence[Row]) -> Tensor | None:
        """Replay the graph of the next size; None where no graph serves such a step.

        Returns:
            [size, hidden size], those of the tokens of `rows` first; the next step overwrites it.
        """
        counts = [len(row.tokens) for row in rows]
        if sum(counts) > self._sizes[-1] or max(counts) > LONGEST_ROW:
            return None
        size = self._sizes[bisect_left(self._sizes, sum(counts))]
        adapted = any(row.adapter for row in rows)
        self._fill(rows, size, adapted=adapted)
        return self._runs[size, adapted]()

    def _run_of(self, size: int, forward: Callable[[Batch], Tensor], *, adapted: bool) -> Run:
        packed = self._rows[: (6 + adapted) * size + 1]
        width = self._slots.tables.shape[1]
        return lambda: forward(self._slots.batch(packed, size, width, adapted=adapted))

    def _fill(self, rows: Sequence[Row], size: int, *, adapted: bool) -> None:
        packed = pack_rows(rows, self._slots.padding, size, adapted=adapted)
        fill(self._rows[: len(packed)], packed)
