"""The membership in a real process: it joins, computes, and leaves in the middle of a step."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import zmq

from pagefleet.params import SamplingParams
from pagefleet.transport import Hub
from pagefleet.wire import (
    FromWorker,
    Join,
    Open,
    Plan,
    Refused,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
    checksum,
    decode_from_worker,
    encode,
    pack_ints,
)
from pagefleet_worker.server import ALONE_SECONDS
from tests.processes import killed_in_the_end

_T = TypeVar("_T", bound=FromWorker)


class Scheduler:
    """The scheduler's end of one worker's connection."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.peer = b""

    def wait_for(self, kind: type[_T], condition: Callable[[_T], bool] = lambda _: True) -> _T:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for peer, frame in self.hub.receive():
                self.peer = peer
                message = decode_from_worker(frame)
                if isinstance(message, kind) and condition(message):
                    return message
            time.sleep(0.005)
        raise AssertionError(f"no {kind.__name__} came")


def test_a_worker_without_a_scheduler_says_so(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/workers"
    command = [sys.executable, "-m", "pagefleet_worker", "--model=echo", "--engine=echo"]
    with killed_in_the_end(
        subprocess.Popen(
            [*command, f"--worker-endpoint={endpoint}"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        )
    ) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "WARNING" in line)
    assert f"no scheduler answers at {endpoint}" in said
    assert "--worker-endpoint" in said


def test_a_worker_that_is_refused_says_why_once(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/workers"
    command = [sys.executable, "-m", "pagefleet_worker", "--model=echo", "--engine=echo"]
    with (
        zmq.Context() as context,
        closing(Hub(endpoint, context)) as hub,
        killed_in_the_end(
            subprocess.Popen(
                [*command, f"--worker-endpoint={endpoint}"],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            )
        ) as process,
    ):
        scheduler = Scheduler(hub)
        began = time.monotonic()
        while time.monotonic() < began + 2 * ALONE_SECONDS:
            scheduler.wait_for(WorkerHello)
            hub.send(scheduler.peer, encode(Refused("You are too old.")))
        process.terminate()
        _, said = process.communicate(timeout=60)
    warnings = [line for line in said.splitlines() if "WARNING" in line]
    assert len(warnings) == 1, said
    assert "shut out by the scheduler: You are too old." in warnings[0]


def test_sigterm_in_the_middle_of_a_step(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/workers"
    command = [
        sys.executable, "-m", "pagefleet_worker", "--model=echo", "--engine=echo",
        "--step-seconds=60", f"--worker-endpoint={endpoint}",
    ]  # fmt: skip
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with (
        closing(Hub(endpoint, context)) as hub,
        killed_in_the_end(
            subprocess.Popen(
                command,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            )
        ) as process,
    ):
        scheduler = Scheduler(hub)
        scheduler.wait_for(WorkerHello)
        hub.send(scheduler.peer, encode(Join(7)))
        scheduler.wait_for(WorkerBeat)
        params = SamplingParams(max_tokens=1, seed=1)
        opens = [Open(0, params, pack_ints([5]), b"", [0])]
        rows, tables = pack_ints([0, 0, 1, 1, 1, checksum(pack_ints([3]))]), pack_ints([0, 0, 3])
        plan = Plan(7, 0, rows, pack_ints([5]), opens=opens, tables=tables)
        hub.send(scheduler.peer, encode(plan))
        scheduler.wait_for(WorkerBeat, lambda beat: beat.busy)
        process.send_signal(signal.SIGTERM)
        assert scheduler.wait_for(WorkerBye) == WorkerBye(7)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    context.destroy(linger=0)
