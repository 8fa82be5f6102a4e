"""A cell of two machines, parted by CURVE, by deaths, and by cables that are pulled.

    near: gateway, scheduler, worker          far: gateway, worker

What is quick has both machines on this one: the far one's processes reach the scheduler only at TCP
addresses that need the cell's key. The slow tests have a network between them, and the far machine
its own process numbers, as a container does.
"""

import contextlib
import itertools
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagefleet import cell_key
from pagefleet.gate import QUIET_SECONDS
from tests.faults.cell import Service, make_cell, wait_until
from tests.faults.conftest import CHUNK, STEP_SECONDS, Load, assert_exact, once
from tests.faults.namespace import Namespace

LOCAL = "127.0.0.2"
"""Of this machine, but no loopback address that is taken without a key."""

WORKER = ["--engine=echo", f"--step-seconds={STEP_SECONDS}", f"--max-num-batched-tokens={CHUNK}"]


def reserved(host):
    """A port that nobody is given while this is open, and whoever names it can listen at."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


class Ends:
    """Where machines meet, and under which key."""

    def __init__(self, folder, host):
        self.held = {side: reserved(host) for side in ("gateways", "workers")}
        self.ports = {side: held.getsockname()[1] for side, held in self.held.items()}
        self.host, self.key = host, folder / "cell.key"
        cell_key.make(self.key)

    def listening(self):
        """What the scheduler is told."""
        ends = [f"--listen-{side}=tcp://{self.host}:{port}" for side, port in self.ports.items()]
        return [f"--cell-key={self.key}", *ends]

    def far(self, side):
        """What a far gateway or worker is told."""
        end = f"--{side}-endpoint=tcp://{self.host}:{self.ports[side + 's']}"
        return [f"--cell-key={self.key}", end]


def spanning(folder, model, host, inside=()):
    """A cell with one of each kind on either machine."""
    folder.mkdir(exist_ok=True)
    ends = Ends(folder, host)
    cell = make_cell(
        folder, model, workers=1, scheduler=ends.listening(), worker=WORKER[1:], host=host
    )
    cell.ends = ends
    cell.sockets += ends.held.values()
    cell.add_worker(*WORKER, *ends.far("worker"), inside=inside)
    cell.add_gateway(host, *ends.far("gateway"), inside=inside)
    return cell


def ask_both(cell, questions, watch=lambda answer: None, tokens=60):
    """Questions to the near gateway and to the far one at once; all answers."""
    loads = [Load(questions, tokens=tokens) for _ in cell.gateways]
    with ThreadPoolExecutor() as clients:
        asked = [
            clients.submit(load.run, cell, watch, gateway=number)
            for number, load in enumerate(loads)
        ]
        return [answer for each in asked for answer in each.result()]


@pytest.fixture(scope="module")
def shared_machines(tmp_path_factory, echo_folder):
    cell = spanning(tmp_path_factory.mktemp("machines"), echo_folder, LOCAL)
    with cell.running():
        yield cell


@pytest.fixture
def machines(shared_machines):
    yield shared_machines
    shared_machines.settle()


def after(tokens, act):
    return once(lambda answer: answer.tokens >= tokens, act)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_worker_dies_on_either_machine(machines, questions, victim):
    """So that each machine computes what the other began."""
    watch = after(10, machines.workers[victim].kill)
    assert_exact(ask_both(machines, questions, watch))
    assert watch.struck


def test_the_scheduler_starts_again(machines, questions):
    watch = after(10, machines.scheduler.restart)
    assert_exact(ask_both(machines, questions, watch))
    assert watch.struck


@pytest.mark.slow
def test_a_far_worker_that_stands_still(machines, questions):
    def stand():
        with machines.workers[1].stopped():
            time.sleep(2.5)

    watch = after(10, threading.Thread(target=stand).start)
    assert_exact(ask_both(machines, questions, watch, tokens=300))
    assert watch.struck


def knock(host, port, until):
    """Connect again and again, a hundred times at least, and say what nobody understands."""
    chance, count = random.Random(), 0
    while count < 100 or not until.is_set():
        with socket.socket() as stranger, contextlib.suppress(OSError):
            stranger.settimeout(0.05)
            stranger.connect((host, port))
            mechanism = chance.choice([b"NULL", b"PLAIN", b"CURVE"])
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(52, b"\0")
            stranger.sendall(chance.choice([b"", greeting]) + chance.randbytes(200))
            count += 1
            if chance.random() < 0.1:
                stranger.recv(100)


def test_strangers_and_members_of_another_cell_disturb_nobody(machines, questions, tmp_path):
    ends, began = machines.ends, time.monotonic()
    refused = machines.scheduler.said("refused")
    cell_key.make(tmp_path / "other.key")
    usual = [f"--model={machines.model}", f"--cell-key={tmp_path}/other.key"]
    worker, gateway = (
        Service(f"{name}-other", [*ends.far(name), *usual, *more], tmp_path / f"{name}.log")
        for name, more in (("worker", WORKER), ("gateway", ["--port=0"]))
    )
    done = threading.Event()
    crowd = [
        threading.Thread(target=knock, args=(ends.host, port, done)) for port in ends.ports.values()
    ]
    with contextlib.ExitStack() as stack:
        for stranger in (worker, gateway):
            stack.callback(stranger.end)
            stranger.start()
        for thread in crowd:
            stack.callback(thread.join)
            thread.start()
        stack.callback(done.set)
        assert_exact(ask_both(machines, questions))
        for stranger in (worker, gateway):
            wait_until(lambda s=stranger: s.said("does not let this process in: give it by --cell"))
        assert machines.health()[1]["workers"] == 2
    lines = 1 + (time.monotonic() - began) / QUIET_SECONDS
    assert machines.scheduler.said("refused") <= refused + lines


@pytest.fixture
def cabled(tmp_path, echo_folder):
    """A cell whose far machine is at the other end of a cable, `cell.cable`."""
    with Namespace().made() as namespace:
        cell = spanning(tmp_path / "cell", echo_folder, namespace.address, namespace.inside)
        cell.cable = namespace
        with cell.running():
            yield cell
            cell.settle()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["unplug", "lose"])
@pytest.mark.parametrize("seconds", [0.2, 2, 20])
def test_the_link_between_machines(cabled, questions, seconds, way):
    """Streams of the far gateway wait for it, those of the far worker go on at the near one."""
    trouble = threading.Thread(target=getattr(cabled.cable, way), args=[seconds])
    watch = after(10, trouble.start)
    answers = ask_both(cabled, questions, watch, tokens=100 if seconds < 1 else 300)
    assert watch.struck
    trouble.join()
    assert_exact(answers)
    assert max(answer.longest_gap for answer in answers) < seconds + 5
    cabled.settle(10)


@pytest.mark.slow
def test_a_thin_link_between_machines(cabled, questions):
    """A quarter of a megabit, which plans and outputs fill."""
    with cabled.cable.slowed("256kbit"):
        assert_exact(ask_both(cabled, questions, tokens=150))


@pytest.mark.slow
def test_a_death_in_another_machine_s_numbers(cabled, questions):
    """Nothing here has to do with the number that a far process has there: silence tells."""
    watch = after(10, cabled.workers[1].kill)
    answers = ask_both(cabled, questions, watch)
    assert watch.struck
    assert_exact(answers)
    assert cabled.scheduler.said("a worker process has ended") == 0
    assert max(answer.longest_gap for answer in answers) < 5


@pytest.mark.slow
def test_troubles_of_all_kinds_at_random_times(cabled, questions):
    seed = random.randrange(2**32)
    print("troubles of seed", seed)
    chance, done, struck = random.Random(seed), threading.Event(), Counter()
    troubles = {
        "near worker": cabled.workers[0].restart,
        "far worker": cabled.workers[1].restart,
        "scheduler": cabled.scheduler.restart,
        "unplugged": lambda: cabled.cable.unplug(chance.uniform(0.1, 3)),
        "deaf": lambda: cabled.cable.lose(chance.uniform(0.1, 3)),
    }

    def make_trouble():
        names = itertools.cycle(chance.sample([*troubles], len(troubles)))
        while not done.wait(chance.uniform(0.2, 2)):
            name = next(names)
            troubles[name]()
            struck[name] += 1

    trouble = threading.Thread(target=make_trouble)
    trouble.start()
    try:
        answers = [a for _ in range(8) for a in ask_both(cabled, questions, tokens=150)]
    finally:
        done.set()
        trouble.join()
    print(len(answers), "streams,", *struck.items())
    assert_exact(answers)
    assert struck.keys() == troubles.keys()
