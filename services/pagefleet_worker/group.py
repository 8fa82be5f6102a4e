"""A worker of several ranks: they share the tensors of a model, and act as one worker.

Rank 0 is the worker's process; it starts one more for each other rank and hands every plan on to
them. All ranks hold the same slots and tables, do the same steps in the same order, and meet in the
sums of every layer (`ranks`), so a follower's answer is rank 0's, and nobody asks for it. Where one
of them fails alone, the others wait in a sum that never comes. So the worker lives and dies as a
whole: a rank that is gone, or a step that failed, ends the process, and whoever started it starts
all of them anew. The scheduler moves the streams meanwhile, as from any worker that died.

An order is `Order`, in msgpack, through a pair of sockets. A follower whose end of it closes ends.
A follower that stops within a step is found out by the progress that rank 0 does not make; one that
stops between steps by its silence, as it beats through a pipe.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.connection import Pipe
from pathlib import Path

import msgspec
import torch

from pagefleet.command_line import flags
from pagefleet.host import usable_cores
from pagefleet.manifest import Manifest
from pagefleet.settings import WorkerSettings
from pagefleet.tether import tethered
from pagefleet.wire import Plan, Result
from pagefleet_kernels.quantized import GROUP
from pagefleet_worker.interface import DeviceLostError, EngineFacts, Launched, PlanError
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.config import ARCHITECTURES, load_config
from pagefleet_worker.model.ranks import Ranks
from pagefleet_worker.model.shares import Share
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.model_loading import choose_device, choose_quantization
from pagefleet_worker.paging.transfer import use
from pagefleet_worker.step.engine import TorchEngine

SIGN_SECONDS = 0.2
"""Between two signs of life of a follower."""

_SILENCE_SECONDS = 1.0
"""Without a sign of life, after which a follower does not count as alive."""

_VERDICT_SECONDS = 1.0
"""That the end of ranks may take to be seen, once others failed to reach them."""


class Order(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 has the others do: a step, after they took the results of all but the last
    `under_way` ones; without a plan, to begin an epoch.
    """

    under_way: int
    plan: Plan | None


def load_group(
    folder: Path,
    settings: WorkerSettings,
    progress: Callable[[], None],
    on_end: Callable[[int, int], None],
) -> "Group":
    """Load the prepared model in `folder` on as many devices as `settings` say.

    progress: see `load_engine`. on_end: see `Follower`; a group that lacks one is of no use.

    Raises:
        ModelError: the model cannot be shared, or not be served with these settings.
        pagefleet.manifest.ManifestError: the folder is no prepared model.
    """
    _check_shareable(folder, settings)
    own, *others = settings_of_ranks(replace(settings, model=str(folder)))
    ranks = settings.tensor_parallel_size
    rendezvous = os.memfd_create("pagefleet-ranks")  # whoever dies leaves no file behind
    followers = [
        Follower(Share(rank, ranks), each, rendezvous, on_end)
        for rank, each in enumerate(others, 1)
    ]
    try:
        met = meet(Share(0, ranks), own, rendezvous)
        engine = load_engine(folder, own, progress, met)
    except RuntimeError:
        _wait_for_ends(followers)
        raise
    return Group(engine, followers, met)


def meet(share: Share, settings: WorkerSettings, rendezvous: int) -> Ranks:
    """`Ranks.meet`, as `settings` say."""
    device = choose_device(settings.device)
    use(device)
    return Ranks.meet(share, device, rendezvous, in_order=settings.batch_invariant)


def settings_of_ranks(settings: WorkerSettings) -> list[WorkerSettings]:
    """What each rank of a worker is told: a device of its own, and its part of the cores.

    Raises:
        ModelError: there are not as many devices.
    """
    ranks, names = settings.tensor_parallel_size, settings.device.split(",")
    if names == ["auto"]:
        names = ["cuda" if torch.cuda.is_available() else "cpu"]
    if names == ["cpu"]:
        names = ["cpu"] * ranks
    elif names == ["cuda"]:
        names = [f"cuda:{index}" for index in range(ranks)]
    elif len(names) != ranks or len({*names} - {"cpu", "cuda", "auto"}) != ranks:
        raise ModelError(
            f"--tensor-parallel-size {ranks} takes {ranks} different devices, and --device "
            f"{settings.device} names others; write for example --device cuda."
        )
    threads = max((settings.threads or usable_cores()) // ranks, 1)
    return [replace(settings, device=name, threads=threads) for name in names]


def _check_shareable(folder: Path, settings: WorkerSettings) -> None:
    """Refuse here, in one process, what every rank would refuse."""
    manifest = Manifest.load(folder)
    if manifest.architecture not in ARCHITECTURES:
        raise ModelError(
            f"transformers computes a {manifest.architecture} model, and on one device: leave out "
            "--tensor-parallel-size."
        )
    own = Share(0, settings.tensor_parallel_size).of(load_config(folder))
    quantization = choose_quantization(settings.quantization, manifest.weights.kind)
    sizes = own.attended_size, *sorted(own.inner_sizes)
    if quantization.others and any(size % GROUP for size in sizes):
        raise ModelError(
            f"A rank's {sizes[0]} numbers of its heads and {' or '.join(map(str, sizes[1:]))} of "
            f"its neurons are no multiples of {GROUP}: leave out --quantization or "
            "--tensor-parallel-size."
        )
    _check_loopback()


def _check_loopback() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # which sends nothing
        except OSError as error:
            raise ModelError(
                "The ranks of a worker meet by the loopback interface, which does not work here "
                f"({error.strerror}): bring it up, or leave out --tensor-parallel-size."
            ) from error


class Follower:
    """The process of a rank other than 0.

    settings: of its rank. rendezvous: see `Ranks.meet`. on_end: told its rank and how it ended, as
    Popen says it, unless it was asked to.

    Start it from the main thread: it dies with the thread that starts it.
    """

    def __init__(
        self,
        share: Share,
        settings: WorkerSettings,
        rendezvous: int,
        on_end: Callable[[int, int], None],
    ) -> None:
        self._share, self._on_end = share, on_end
        self._connection, theirs = Pipe()
        self._signs, signs = Pipe(duplex=False)
        with theirs, signs:
            fds = [theirs.fileno(), signs.fileno(), rendezvous]
            own = map(str, [*fds, share.rank])
            command = [sys.executable, "-m", "pagefleet_worker.follower", *own]
            command += flags(settings, WorkerSettings)
            self._process = subprocess.Popen(tethered(command), pass_fds=fds)
        self._closing = False
        self._heard = -inf
        """When it gave its last sign of life."""
        self._watch = threading.Thread(target=self._listen, name="rank-watch", daemon=True)
        self._watch.start()

    def lives(self) -> bool:
        """Whether it follows, and was heard lately."""
        return time.monotonic() - self._heard < _SILENCE_SECONDS

    def send(self, order: bytes) -> None:
        """Hand on an order.

        Raises:
            OSError: it is gone.
        """
        self._connection.send_bytes(order)

    def wait(self, seconds: float) -> None:
        """Wait until its end was told, if it comes."""
        self._watch.join(seconds)

    def close(self) -> None:
        """Let it end, and wait until it did."""
        self._closing = True
        self._connection.close()
        self._watch.join()

    def _listen(self) -> None:
        with self._signs, suppress(EOFError):
            while True:
                self._signs.recv_bytes()
                self._heard = time.monotonic()
        status = self._process.wait()
        if not self._closing:
            self._on_end(self._share.rank, status)


def _wait_for_ends(followers: Sequence[Follower]) -> None:
    """Let the end of a rank be told before what failed because of it."""
    deadline = time.monotonic() + _VERDICT_SECONDS
    for follower in followers:
        follower.wait(max(0.0, deadline - time.monotonic()))


class Group:
    """Rank 0 and its followers, as one engine."""

    def __init__(self, engine: TorchEngine, followers: Sequence[Follower], ranks: Ranks) -> None:
        self._engine, self._followers, self._ranks = engine, followers, ranks
        self._under_way = 0

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._engine.facts

    def lives(self) -> bool:
        """See `Engine`."""
        return all(follower.lives() for follower in self._followers)

    def reset(self) -> None:
        """See `Engine`."""
        self._under_way = 0
        with self._together():
            self._tell(Order(0, None))
            self._engine.reset()

    def launch(self, plan: Plan) -> Launched:
        """See `Engine`."""
        with self._together():
            self._tell(Order(self._under_way, plan))
            launched = self._engine.launch(plan)
        self._under_way += 1
        return _Landing(launched, self._landed)

    def close(self) -> None:
        """Let the followers end; the group does nothing more. No process needs it to end."""
        for follower in self._followers:
            follower.close()
        del self._engine  # NCCL waits for recorded graphs to go
        self._ranks.close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What one rank could not do leaves the others waiting for it."""
        try:
            yield
        except (PlanError, DeviceLostError):
            raise
        except Exception as error:
            _wait_for_ends(self._followers)
            raise DeviceLostError(f"the ranks of this worker are apart: {error!r}") from error

    def _tell(self, order: Order) -> None:
        frame = msgspec.msgpack.encode(order)
        for follower in self._followers:
            follower.send(frame)

    def _landed(self) -> None:
        self._under_way -= 1


@dataclass(frozen=True)
class _Landing:
    """A step whose result is counted when it is taken."""

    launched: Launched
    landed: Callable[[], None]

    def ready(self) -> bool:
        """See `Launched`."""
        return self.launched.ready()

    def result(self) -> Result:
        """See `Launched`."""
        self.landed()
        return self.launched.result()
