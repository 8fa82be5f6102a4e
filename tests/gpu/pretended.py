"""A GPU that is not there: what would fail on one, or keep the host waiting, fails here.

`pretended_gpu` lets torch and Triton's interpreter believe in one. Its tensors (`OnGpu`) are memory
of the host under another name, so that their numbers are right; what they stand for is checked:

- Operations, and launches of kernels, that mix tensors of the host and of the device are refused.
- In the mode "error" of `torch.cuda.set_sync_debug_mode`, so is whatever makes the host wait:
  reading a number, a shape that depends on numbers, copies from or to memory that is not pinned, or
  that were not asked not to wait; and a kernel that no launch before had Triton compile.
- What is copied to pinned memory arrives when an event behind it has been waited for. Until then it
  is rubbish.
- A graph is the list of what was ordered, on tensors that stay: a replay orders that again, and
  asks no Python. While one is captured all of this holds, and nothing may come from the host.
- What ranks exchange, gloo exchanges, in replays too: each rank is a process that pretends.

Not seen is what only a device does: streams beside each other, memory that is reused, its limits.
"""

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from pagefleet_kernels.triton_tiling import chip_of

MEMORY = 1 << 30
RUBBISH = 0xA5

_CAPABILITY = 8, 0
_GRID_LIMIT = (1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1

_READS = re.compile(
    "item|tolist|__(bool|int|float|index|contains|repr|format)__|nonzero|argwhere|unique.*|"
    "masked_select|equal|allclose|is_nonzero|bincount"
)
"""Operations that need a number, or give a shape that depends on some."""

_FROM_HOST = re.compile("(as_|new_)?tensor")
"""Operations whose numbers come in lists of Python."""

_run = InterpretedFunction.run


class OnGpu(Tensor):
    """A tensor that counts as the device's."""

    device = torch.device("cuda", 0)
    is_cuda, is_cpu = True, False


class MixedError(Exception):
    """Tensors of the host and of the device in one operation."""


class WaitError(Exception):
    """The host would wait for the device."""


class CompileError(Exception):
    """A step would wait for a compiler."""


class Gpu(TorchFunctionMode):
    """The device: whatever is asked of torch, and of Triton, while it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.replays = 0
        self._strict = False
        self._captured: list[Callable[[], None]] | None = None
        """What a graph is made of, while one is captured."""
        self._kernels: set[str] = set()
        """What has been compiled."""
        self._arrived = 0
        self._under_way: list[tuple[Tensor, Tensor]] = []
        """Memory of the host, and what has not arrived there yet."""
        self._pinned: dict[int, int] = {}
        """Where ranges of pinned memory begin, and end."""

    def set_sync_debug_mode(self, mode: str) -> None:
        """As torch.cuda's."""
        self._strict = mode == "error"

    @property
    def ordered(self) -> int:
        """Copies to the host so far."""
        return self._arrived + len(self._under_way)

    def arrive(self, count: int) -> None:
        """The first `count` copies to the host are done."""
        with torch.inference_mode(), torch._C.DisableTorchFunction():
            for _ in range(count - self._arrived):
                target, source = self._under_way.pop(0)
                target.copy_(source)
                self._arrived += 1

    def pin(self, address: int, nbytes: int, flags: int = 0) -> int:
        """As cudaHostRegister."""
        self._pinned[address] = address + nbytes
        return flags

    def unpin(self, address: int) -> None:
        """As cudaHostUnregister."""
        del self._pinned[address]

    @contextmanager
    def capture(self, graph: "Graph", **_: Any) -> Iterator[None]:
        """As torch.cuda.graph."""
        self._captured = graph.work
        try:
            yield
        finally:
            self._captured = None

    def launch(self, kernel: InterpretedFunction, *args: Any, **options: Any) -> None:
        """Let the interpreter run a kernel, now and in replays."""
        tensors = [each for each in args if isinstance(each, Tensor)]
        if not all(isinstance(each, OnGpu) for each in tensors):
            raise MixedError(f"{kernel.__name__} is launched on a tensor of the host")
        grid = options["grid"]
        assert all(size <= limit for size, limit in zip(grid, _GRID_LIMIT, strict=False))
        key = _do(partial(_key, kernel, *args, **options))
        if key not in self._kernels and self._must_not_wait:
            raise CompileError(f"the host waits for a compiler: {key}")
        self._kernels.add(key)
        self.launches += 1
        self._order(partial(_run, kernel, *_plain(args), **options))

    def exchange(self, collective: Callable[..., Any], *args: Any) -> None:
        """Exchange tensors with the other ranks, now and in replays."""
        if not all(isinstance(each, OnGpu) for each in tree_leaves(args) if torch.is_tensor(each)):
            raise MixedError(f"{collective.__name__} has a tensor of the host")
        self._order(partial(collective, *_plain(args)))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, dict(kwargs or {})
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        here = any(isinstance(each, OnGpu) for each in given)
        if (
            name in ("to", "cuda", "cpu")
            and (moved := self._moved(name, *args, **kwargs)) is not None
        ):
            return moved
        if name == "copy_" and here:
            return self._copy(*args, **kwargs)
        if name == "pin_memory":
            return self._in_pinned_memory(args[0].clone())
        if kwargs.get("pin_memory"):
            return self._in_pinned_memory(func(*args, **kwargs | {"pin_memory": False}))
        if (device := kwargs.get("device")) is not None:
            here = torch.device(device).type == "cuda"
            kwargs |= {"device": "cpu"} if here else {}
        if not here:
            return _do(partial(func, *args, **kwargs))
        if name == "requires_grad_":  # what a view is no parameter can be
            return args[0]
        if name == "_has_compatible_shallow_copy_type":  # a module on its way gets new parameters
            return False
        self._check(name, args, kwargs, given)
        return _on_gpu(self._order(partial(func, *_plain(args), **_plain(kwargs))))

    @property
    def _must_not_wait(self) -> bool:
        return self._strict or self._captured is not None

    def _order(self, work: Callable[[], Any]) -> Any:
        """Do what replays do again."""
        found = _do(work)
        if self._captured is not None:
            self._captured.append(partial(_again, work, found))
        return found

    def _refuse_to_wait(self, what: str) -> None:
        if self._must_not_wait:
            raise WaitError(f"the host waits for {what}")

    def _check(self, name: str, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> None:
        if name in ("numpy", "__array__"):
            raise TypeError("numpy does not read tensors of a GPU")
        if any(each.dim() for each in given if not isinstance(each, OnGpu)):
            raise MixedError(f"{name} has tensors of the host and of the device")
        if (
            _READS.fullmatch(name)
            or _FROM_HOST.fullmatch(name)
            or (name == "where" and len(args) == 1)
            or (name == "repeat_interleave" and len(given) > 1 and "output_size" not in kwargs)
        ):
            self._refuse_to_wait(name)
        if name in ("__getitem__", "__setitem__"):
            for each in args[1] if isinstance(args[1], tuple) else (args[1],):
                if isinstance(each, Sequence) or getattr(each, "dtype", None) == torch.bool:
                    self._refuse_to_wait(f"an index that is a {type(each).__name__}")

    def _moved(self, name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        """What `Tensor.to` gives; None where everything is the host's."""
        if name != "to":
            args, kwargs = (name,), {}
        elif args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        here, dtype = isinstance(tensor, OnGpu), dtype or tensor.dtype
        there = here if device is None else device.type == "cuda"
        if here and there:
            same = dtype == tensor.dtype
            return tensor if same else _on_gpu(self._order(partial(_plain(tensor).to, dtype)))
        if not here and not there:
            return None
        target = torch.empty(tensor.shape, dtype=dtype)
        return self._copy(_on_gpu(target) if there else target, tensor, non_blocking)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        there, here = isinstance(target, OnGpu), isinstance(source, OnGpu)
        raw = _plain(target)
        work = partial(raw.copy_, _plain(source))
        if there and here:
            self._order(work)
            return target
        alike = target.dtype == source.dtype and target.shape == source.shape
        whole = target.is_contiguous() and source.is_contiguous()
        aside = non_blocking and alike and whole and self._is_pinned(source if there else target)
        if not aside or self._captured is not None:
            self._refuse_to_wait("a copy")
        if aside and here:
            held = _plain(source).clone()
            _do(lambda: raw.view(torch.uint8).fill_(RUBBISH))
            self._under_way.append((raw, held))
        else:
            if any(each.data_ptr() == source.data_ptr() for each, _ in self._under_way):
                self.arrive(self.ordered)  # as the device sees it
            _do(work)
        return target

    def _in_pinned_memory(self, tensor: Tensor) -> Tensor:
        address = tensor.data_ptr()
        if address:
            self.pin(address, tensor.nbytes)
            weakref.finalize(tensor.untyped_storage(), self.unpin, address).atexit = False
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is, or has nothing that would have to be."""
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        ranges = self._pinned.items()
        return first == last or any(begin <= first and last <= end for begin, end in ranges)


def _do(work: Callable[[], Any]) -> Any:
    with torch._C.DisableTorchFunction():
        return work()


def _on_gpu(value: Any) -> Any:
    """All tensors of a value as the device's."""
    if isinstance(value, torch.Size):
        return value
    return tree_map_only(Tensor, lambda each: each.as_subclass(OnGpu), value)


def _plain(value: Any) -> Any:
    """The memory that all tensors of a value are."""
    return _do(lambda: tree_map_only(Tensor, lambda each: each.as_subclass(Tensor), value))


def _again(work: Callable[[], Any], found: Any) -> None:
    """Do `work` once more, into the tensors that it gave."""
    for old, new in zip(tree_leaves(found), tree_leaves(work()), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


@cache
def _binder(kernel: InterpretedFunction) -> Any:
    function = JITFunction(kernel.fn, do_not_specialize=kernel.kwargs["do_not_specialize"])
    backend = make_backend(GPUTarget("cuda", 80, 32))
    return create_function_from_signature(function.signature, function.params, backend)


def _key(kernel: InterpretedFunction, *args: Any, **options: Any) -> str:
    """What Triton tells compiled kernels apart by."""
    options = {name: each for name, each in options.items() if name not in ("grid", "warmup")}
    _, specialization, rest = _binder(kernel)(*args, **options)
    return f"{kernel.__name__} {specialization} {rest}"


class Event:
    """Stands behind all copies that were ordered when it was recorded."""

    gpu: Gpu

    def record(self) -> None:
        self._count = self.gpu.ordered

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.gpu.arrive(self._count)


class Graph:
    """What was ordered while it was captured."""

    gpu: Gpu

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        self.gpu.replays += 1
        with torch.inference_mode(), torch._C.DisableTorchFunction():
            for each in self.work:
                each()


class Stream:
    """The only one: whatever is ordered is done at once."""

    def wait_stream(self, other: "Stream") -> None: ...

    def wait_event(self, event: Event) -> None: ...


@contextmanager
def pretended_gpu() -> Iterator[Gpu]:
    """Have a GPU, and one more for another rank, in Triton's interpreter."""
    gpu = Gpu()
    stream = Stream()
    runtime = SimpleNamespace(cudaHostRegister=gpu.pin, cudaHostUnregister=gpu.unpin)
    major, minor = _CAPABILITY
    chip = SimpleNamespace(multi_processor_count=2, major=major, minor=minor)
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "set_sync_debug_mode": gpu.set_sync_debug_mode,
        "synchronize": lambda device=None: gpu.arrive(gpu.ordered),
        "get_device_capability": lambda device: _CAPABILITY,
        "get_device_name": lambda device: "pretended",
        "get_device_properties": lambda device: chip,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (MEMORY, MEMORY),
        "memory_allocated": lambda device: 0,
        "memory_reserved": lambda device: 0,
        "max_memory_allocated": lambda device: 0,
        "reset_peak_memory_stats": lambda device: None,
        "cudart": lambda: runtime,
        "Event": type("Event", (Event,), {"gpu": gpu}),
        "Stream": Stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": lambda: None,
        "CUDAGraph": type("Graph", (Graph,), {"gpu": gpu}),
        "graph": gpu.capture,
    }

    begin = dist.init_process_group
    exchanges: dict[str, Callable[..., Any]] = {
        name: partial(gpu.exchange, getattr(dist, name))
        for name in ("all_reduce", "all_gather", "broadcast")
    }
    exchanges["init_process_group"] = lambda nccl, device_id, **meeting: begin("gloo", **meeting)

    def run(kernel: InterpretedFunction, *args: Any, **options: Any) -> None:
        gpu.launch(kernel, *args, **options)

    chip_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch, gpu:
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        for name, function in exchanges.items():
            patch.setattr(dist, name, function)
        patch.setattr(InterpretedFunction, "run", run)
        yield gpu
    chip_of.cache_clear()
