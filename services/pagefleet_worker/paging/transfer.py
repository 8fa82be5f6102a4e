"""Between host and device without making either wait for the other.

What goes to a GPU is put into pinned memory first, else the driver would wait for the device; torch
keeps that memory until the copy is done. What comes back of a step comes in one copy, with an event
behind it. On a CPU there is nothing to move.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagefleet_worker.interface import DeviceLostError


def to_device(
    values: ArrayLike, device: torch.device, dtype: type[np.generic] | None = None
) -> Tensor:
    """`values` as a tensor on `device`, ordered on its current stream; `dtype` is numpy's."""
    tensor = torch.from_numpy(np.array(values, dtype))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, values: NDArray[Any]) -> None:
    """Order the copy of an array into a tensor of its shape and type, on the current stream."""
    tensor = torch.from_numpy(values)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def all_to_device(values: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """`to_device` of some arrays, in one copy; each keeps its type."""
    tensors = [torch.from_numpy(each) for each in values]
    if device.type == "cpu":
        return tensors
    return unpack(to_device(pack(tensors).numpy(), device), tensors)


def use(device: torch.device) -> None:
    """Make `device` the one that this thread orders work on; a thread begins with the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def telling_loss(device: torch.device) -> Iterator[None]:
    """Tell a GPU that is lost from a step that failed: CUDA answers a process for good with the
    first error of a kernel, while it gets over a lack of memory.

    Raises:
        DeviceLostError: in the place of an error behind which the device does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if device.type == "cuda" and not _answers(device):
            raise DeviceLostError(f"{device} is lost for this process: {error}") from error
        raise


def _answers(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


class Download:
    """Tensors of one device on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._device = self._tensors[0].device
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            packed = pack(tensors)
            host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
            self._tensors = unpack(host, tensors)

    def ready(self) -> bool:
        """Whether `tensors` would not wait."""
        if self._event is None:
            return True
        with telling_loss(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def tensors(self) -> list[Tensor]:
        """Wait for them; they are on the host then."""
        if self._event is not None:
            with telling_loss(self._device):
                self._event.synchronize()
        return self._tensors


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors, uint8, one tensor after another."""
    return torch.cat([tensors[at].flatten().view(torch.uint8) for at in _widest_first(tensors)])


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of what `pack` made of tensors of the shapes and types of `tensors`."""
    order = _widest_first(tensors)
    pieces = torch.split(packed, [tensors[at].nbytes for at in order])
    views = [
        piece.view(tensors[at].dtype).view(tensors[at].shape)
        for at, piece in zip(order, pieces, strict=True)
    ]
    return [view for _, view in sorted(zip(order, views, strict=True), key=lambda each: each[0])]


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    """An order in which every tensor begins at a multiple of its elements' size."""
    return sorted(range(len(tensors)), key=lambda at: -tensors[at].element_size())
