"""A cell of real processes on this machine, each of which a test may kill, stop or start again.

    client --> gateway --> proxy --> scheduler <-- proxy <-- worker

There is no supervisor, so that nothing happens but what the test does.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.drill.processes import descriptors, is_alive, state
from benchmarks.loadgen.recording import Server
from pagefleet import faultpoints
from tests.faults.proxy import Proxy

PATIENCE = 60.0
"""Seconds that anything may take: ten times what it takes on an idle machine."""


def wait_until(condition, seconds=PATIENCE, what=lambda: ""):
    """The first true value of `condition()`; `what` tells how things are where it never comes."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain. {what()}"
        time.sleep(0.02)
    return value


class Service:
    """A process that can be started again under the same name.

    inside: words before its command that move it to where it runs.
    """

    def __init__(self, name, arguments, log, *, fds=(), inside=()):
        self.name, self.arguments, self.log = name, arguments, log
        self._fds, self._inside = fds, inside
        self._process = None
        self.at_rest = None

    @property
    def pid(self):
        return self._process.pid

    @property
    def alive(self):
        return self._process is not None and is_alive(self.pid)

    def start(self, faults=""):
        """Start it, with a schedule of fault points."""
        module = f"pagefleet_{self.name.partition('-')[0]}"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._inside, sys.executable, "-m", module, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._fds,
                env={**os.environ, faultpoints.VARIABLE: faults, "OMP_NUM_THREADS": "1"},
            )
        self.at_rest = None

    def kill(self):
        """SIGKILL, and wait for its death."""
        self._process.kill()
        assert self._process.wait() == -signal.SIGKILL

    def send(self, number):
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, seconds=PATIENCE):
        """Wait for its end, and give its status."""
        return self._process.wait(seconds)

    def leave(self):
        """SIGTERM, and wait for its end."""
        self.send(signal.SIGTERM)
        assert self.wait() == 0

    def restart(self, faults=""):
        """Kill it if it lives, and start it again."""
        if self.alive:
            self.kill()
        self._process.wait()
        self.start(faults)

    @contextlib.contextmanager
    def stopped(self):
        """SIGSTOP, and SIGCONT in the end."""
        self._process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(self.pid) == "T", what=lambda: self.name)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def said(self, text):
        """How many lines of its log have the text."""
        return sum(text in line for line in self.log.read_text(errors="replace").splitlines())

    def end(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Cell:
    """All of them; `--check` is on, so the scheduler dies of any broken invariant."""

    def __init__(
        self,
        folder,
        model,
        *,
        workers=2,
        gateways=1,
        engine="echo",
        scheduler=(),
        worker=(),
        host="127.0.0.1",
        seed=0,
    ):
        self.folder, self.model = folder, model
        ends = {side: f"ipc://{folder}/{side}-hub" for side in ("gateways", "workers")}
        fronts = {side: f"ipc://{folder}/{side}" for side in ends}
        self.gateway_proxy, self.worker_proxy = (
            Proxy(folder / side, folder / f"{side}-hub", seed) for side in ends
        )
        self.sockets, self.servers = [], []
        self.scheduler = self._service(
            "scheduler",
            "--check",
            f"--gateway-endpoint={ends['gateways']}",
            f"--worker-endpoint={ends['workers']}",
            *scheduler,
        )
        self.workers, self.gateways = [], []
        for _ in range(workers):
            self.add_worker(f"--engine={engine}", f"--worker-endpoint={fronts['workers']}", *worker)
        for _ in range(gateways):
            self.add_gateway(host, f"--gateway-endpoint={fronts['gateways']}")

    def add_worker(self, *arguments, inside=()):
        """One more, to be started with the others."""
        name = f"worker-{len(self.workers)}"
        worker = self._service(name, f"--model={self.model}", *arguments, inside=inside)
        self.workers.append(worker)

    def add_gateway(self, host, *arguments, inside=()):
        """One more, to be started with the others; this process listens for it at `host`."""
        listener = socket.create_server((host, 0))
        gateway = self._service(
            f"gateway-{len(self.gateways)}",
            f"--model={self.model}",
            "--resume-secret=shared by these gateways",
            f"--fd={listener.fileno()}",
            *arguments,
            fds=[listener.fileno()],
            inside=inside,
        )
        self.sockets.append(listener)
        self.servers.append(Server(host, listener.getsockname()[1], ""))
        self.gateways.append(gateway)

    def _service(self, name, *arguments, fds=(), inside=()):
        return Service(name, arguments, self.folder / f"{name}.log", fds=fds, inside=inside)

    @property
    def services(self):
        return [self.scheduler, *self.workers, *self.gateways]

    @property
    def server(self):
        return self.servers[0]

    @property
    def proxies(self):
        return [self.gateway_proxy, self.worker_proxy]

    def worker_of(self, link):
        """The worker at the other end of a connection through the proxy."""
        return next(worker for worker in self.workers if worker.pid == link.pid)

    @contextlib.contextmanager
    def running(self):
        """Start all, and end all."""
        with self.gateway_proxy, self.worker_proxy, contextlib.ExitStack() as stack:
            for listener in self.sockets:
                stack.enter_context(listener)
            for service in self.services:
                stack.callback(service.end)
                service.start()
            self.settle()
            yield self

    def get(self, path, gateway=0, timeout=10.0):
        """Status and body of an answer; 0 where there is none."""
        server = self.servers[gateway]
        try:
            with urllib.request.urlopen(
                f"http://{server.host}:{server.port}{path}", timeout=timeout
            ) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:
            return 0, b""

    def health(self, gateway=0):
        """Status of /health, and what it says where that is 200."""
        status, body = self.get("/health", gateway)
        return status, json.loads(body) if status == 200 else {}

    def figures(self, gateway=0):
        """/metrics: values by the name with its labels, without those that are the same in all."""
        found = {}
        for line in self.get("/metrics", gateway)[1].decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name.replace('model_name="echo",', "")] = float(value)
        return found

    def total(self, name, gateway=0):
        """The sum of a figure over all labels that contain `name`."""
        return sum(value for key, value in self.figures(gateway).items() if name in key)

    def held_blocks(self, gateway=0):
        """Blocks that sequences hold, on all workers; -1 while the gateway does not know."""
        blocks = {k: v for k, v in self.figures(gateway).items() if "pagefleet_blocks" in k}
        return int(sum(v for k, v in blocks.items() if '"used"' in k)) if blocks else -1

    def settle(self, seconds=PATIENCE):
        """Start what is dead, and wait until nothing is left of the requests, anywhere."""
        for proxy in self.proxies:
            proxy.forgive()
        for service in self.services:
            if not service.alive:
                service.restart() if service.at_rest is not None else service.start()
        for gateway in range(len(self.gateways)):
            wait_until(
                lambda g=gateway: self._is_idle(g),
                seconds,
                lambda g=gateway: f"{self.health(g)}, {self.held_blocks(g)} blocks held",
            )
        for service in self.services:
            if service.at_rest is None:
                service.at_rest = descriptors(service.pid)
            wait_until(
                lambda s=service: descriptors(s.pid) <= s.at_rest,
                seconds,
                lambda s=service: f"{s.name}: {descriptors(s.pid)} descriptors, {s.at_rest} before",
            )

    def _is_idle(self, gateway):
        status, health = self.health(gateway)
        return (
            status == 200
            and health["workers"] == len(self.workers)
            and health["running"] == health["waiting"] == 0
            and self.held_blocks(gateway) == 0
        )


def make_cell(folder: Path, model: Path, **options) -> Cell:
    """A cell whose sockets and logs lie in `folder`, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    return Cell(folder, model, **options)
