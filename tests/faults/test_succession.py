"""A cell whose scheduler is known by a name, which leads to another machine when that one is lost.

The machines are addresses of this one. What names mean to a service stands in a file of its own,
which lies over /etc/hosts where the service lives.
"""

import contextlib
import subprocess

import pytest

from pagefleet import cell_key
from tests.faults.cell import Service, make_cell
from tests.faults.conftest import Load, assert_exact, once
from tests.faults.test_machines import WORKER, reserved

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
"""Of this machine, but no loopback addresses that are taken without a key."""

NAME = "scheduler.cell"


class Names:
    """What a name leads to, for whoever is started behind the words `inside`."""

    def __init__(self, file):
        self._file = file
        over = 'mount --bind "$0" /etc/hosts && exec "$@"'
        self.inside = ["unshare", "--mount", "--propagation=private", "sh", "-c", over, str(file)]
        self.point_to(FIRST)
        done = subprocess.run([*self.inside, "true"], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no files can be laid over others here: {done.stderr.strip()}")

    def point_to(self, address):
        self._file.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")


@pytest.fixture
def cell(tmp_path, echo_folder):
    """`cell.successor` is a scheduler on another machine, which has not been started."""
    names, key = Names(tmp_path / "hosts"), f"--cell-key={tmp_path}/cell.key"
    cell_key.make(tmp_path / "cell.key")
    held = {side: reserved(FIRST) for side in ("gateway", "worker")}
    ports = {side: socket.getsockname()[1] for side, socket in held.items()}

    def scheduler(host):
        return [key, *(f"--listen-{side}s=tcp://{host}:{port}" for side, port in ports.items())]

    def member(side):
        return [key, f"--{side}-endpoint=tcp://{NAME}:{ports[side]}"]

    cell = make_cell(
        tmp_path / "cell", echo_folder, workers=0, gateways=0, scheduler=scheduler(FIRST)
    )
    cell.names = names
    cell.sockets += held.values()
    for _ in range(2):
        cell.add_worker(*WORKER, *member("worker"), inside=names.inside)
    cell.add_gateway("127.0.0.1", *member("gateway"), inside=names.inside)
    own = [f"--{side}-endpoint=ipc://{tmp_path}/{side}s" for side in ports]
    log = tmp_path / "successor.log"
    cell.successor = Service("scheduler-successor", ["--check", *own, *scheduler(SECOND)], log)
    with cell.running(), contextlib.ExitStack() as stack:
        stack.callback(cell.successor.end)
        yield cell
        cell.scheduler = cell.successor
        cell.settle()


def succeed(cell):
    """Have the other machine's scheduler take over."""
    cell.successor.start()
    cell.names.point_to(SECOND)


def test_a_scheduler_dies_and_another_machine_s_takes_over(cell, questions):
    def strike():
        cell.scheduler.kill()
        succeed(cell)

    watch = once(lambda answer: answer.tokens >= 10, strike)
    assert_exact(Load(questions, tokens=60).run(cell, watch))
    assert watch.struck


def test_a_scheduler_that_wakes_after_its_successor_took_over(cell, questions):
    """A machine that is lost says nothing; if it comes back, nobody is there any more."""
    with contextlib.ExitStack() as stack:

        def strike():
            stack.enter_context(cell.scheduler.stopped())
            succeed(cell)

        watch = once(lambda answer: answer.tokens >= 10, strike)
        assert_exact(Load(questions, tokens=60).run(cell, watch))
        assert watch.struck
    assert_exact(Load(questions, tokens=30).run(cell))
    assert cell.health()[1]["workers"] == 2
    cell.scheduler.leave()
