"""What the ranks of a worker tell each other within a step.

A rank's matrices give summands of what a layer puts out (`shares`): every rank gets their sum. On a
GPU it is NCCL's, whose order may depend on how many there are, unless a row's bits are not to
depend on its batch; then, and on a CPU, each rank gathers the summands and adds them up by rank.

All ranks draw the same tokens from the same scores. That is not left to chance: those of rank 0
hold. Every rank has to call the same operations in the same order.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from pagefleet_worker.model.shares import WHOLE, Share


class Ranks:
    """The processes that compute as one worker, seen from one of them."""

    def __init__(self, share: Share, *, in_order: bool, rendezvous: int | None = None) -> None:
        self.share = share
        self._in_order = in_order
        self._rendezvous = rendezvous

    @classmethod
    def meet(
        cls, share: Share, device: torch.device, rendezvous: int, *, in_order: bool
    ) -> "Ranks":
        """Wait for the others, who have the same file open, which is empty at first.

        Args:
            share: which rank this process is.
            device: what it computes on.
            rendezvous: a descriptor of the file. NCCL looks into it as long as the ranks are
                together; `close` closes it.
            in_order: add up in the order of the ranks on a GPU, too.
        """
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # ranks share a machine
        own = device if device.type == "cuda" else None
        path = f"/proc/self/fd/{rendezvous}"
        store = dist.FileStore(path, share.ranks)  # type: ignore[attr-defined]
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=share.rank, world_size=share.ranks, device_id=own
        )
        return cls(share, in_order=in_order or device.type == "cpu", rendezvous=rendezvous)

    def close(self) -> None:
        """Part; this process may meet others then."""
        if self._rendezvous is not None:
            dist.destroy_process_group()
            os.close(self._rendezvous)

    def sum(self, summands: Tensor) -> Tensor:
        """Of every rank's tensor; rounded once if it is added up in order."""
        if self.share.ranks == 1:
            return summands
        if not self._in_order:
            dist.all_reduce(summands)
            return summands
        first, *others = self._all(summands)
        total: Tensor = first.float()
        for each in others:
            total += each
        return total.to(summands.dtype)

    def beside(self, columns: Tensor) -> Tensor:
        """Every rank's columns of [T, C], one after another: [T, ranks * C]."""
        if self.share.ranks == 1:
            return columns
        return torch.cat(list(self._all(columns)), 1)

    def agree(self, values: Tensor) -> Tensor:
        """Those of rank 0."""
        if self.share.ranks > 1:
            dist.broadcast(values, 0)
        return values

    def least(self, number: int, device: torch.device) -> int:
        """Of every rank's."""
        if self.share.ranks == 1:
            return number
        least = torch.tensor(number, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def _all(self, values: Tensor) -> Tensor:
        """Every rank's tensor: [ranks, ...]."""
        gathered = values.new_empty((self.share.ranks, *values.shape))
        dist.all_gather(list(gathered.unbind()), values.contiguous())
        return gathered


ALONE = Ranks(WHOLE, in_order=True)
"""One process is the worker."""
