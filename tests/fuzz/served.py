"""A cell of real processes that is fuzzed: what is measured of it, and whether it still serves."""

import contextlib
import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from benchmarks.drill.processes import children
from benchmarks.drill.questions import Questioner
from benchmarks.loadgen.recording import Server
from pagefleet_worker.prepare import prepare
from tests.faults.conftest import Load, assert_exact
from tests.system.serving import Serving, pagefleet_serve

SIDES = ("gateway", "worker")
"""The two sockets of the scheduler."""

_OPTIONS = ("--check", "--max-model-len=128", "--max-body-bytes=65536", "--worker-wait=5")
_LAG_SECONDS = 0.1
"""A wake in ten may be later, for what else the machine does."""


@dataclass
class EchoCell:
    """A cell under its supervisor, which would start what has died under another pid."""

    serving: Serving
    questions: Questioner
    folder: Path

    @property
    def servers(self):
        return [Server.at(self.serving.url)]

    @property
    def services(self):
        return children(self.serving.process.pid)

    def resident(self):
        """MiB of each service."""
        found = {}
        for pid, name in self.services.items():
            with open(f"/proc/{pid}/statm") as file:
                found[name] = int(file.read().split()[1]) * 4 // 1024
        return found

    def lag(self):
        """How often the gateway's event loop was late, by the least bound in seconds."""
        lines = httpx.get(f"{self.serving.url}/metrics").text
        found = re.findall(r'event_loop_lag_seconds_bucket{le="(.*)"} (.*)', lines)
        counts = [0, *(int(float(count)) for _, count in found)]
        return Counter(
            {float(le): b - a for (le, _), (a, b) in zip(found, pairwise(counts), strict=True)}
        )

    def assert_serves(self):
        assert_exact(Load(self.questions, prompt=20, tokens=20).run(self))

    def endpoint(self, side):
        """Where the scheduler meets gateways, or workers."""
        return f"ipc://{self.folder}/{side}"

    @contextlib.contextmanager
    def unhurt(self, growth=64):
        """Whatever is done inside: nothing dies or grows by so many MiB, no event loop waits, and
        it serves.
        """
        self.assert_serves()
        services, before, lag = self.services, self.resident(), self.lag()
        yield
        after, lag = self.resident(), self.lag() - lag
        print(f"MiB before {before}, after {after}; lag {dict(lag)}")
        assert self.services == services
        assert all(after[name] < before[name] + growth for name in before)
        assert sum(lag[bound] for bound in lag if bound > _LAG_SECONDS) <= lag.total() / 10
        self.assert_serves()


@contextlib.contextmanager
def fuzzed_cell(folder):
    """A cell whose sockets and log lie in `folder`."""
    model = prepare("echo", folder, adapters={"sql": str(folder)})
    questions = Questioner(model, random.randrange(2**32))
    ends = [f"--{side}-endpoint=ipc://{folder}/{side}" for side in SIDES]
    with pagefleet_serve(folder, f"--model={model}", "--engine=echo", *ends, *_OPTIONS) as serving:
        yield EchoCell(serving, questions, folder)
