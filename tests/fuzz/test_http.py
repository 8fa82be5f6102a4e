"""Whatever a client sends: no process dies, nothing answers 500, and the next client is served.

The long run is `python -m pytest tests/fuzz/test_http.py --hypothesis-profile=long --timeout=0 -s`.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drill.processes import children
from benchmarks.drill.questions import Questioner
from benchmarks.loadgen.recording import Server
from pagefleet_worker.prepare import prepare
from tests.faults.conftest import Load, assert_exact
from tests.fuzz.http_answers import Exchange
from tests.fuzz.http_bytes import conversations
from tests.system.serving import Serving, pagefleet_serve

_OPTIONS = ("--check", "--max-model-len=128", "--max-body-bytes=65536", "--worker-wait=5")
_GROWTH_MIB = 64
_LAG_SECONDS = 0.1
"""A wake in a hundred may be later, for what else the machine does."""
_TOGETHER = 4
"""Connections that are open at once, at most."""


@dataclass
class EchoCell:
    """A cell under its supervisor, which would start what has died under another pid."""

    serving: Serving
    questions: Questioner

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


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    questions = Questioner(prepare("echo", folder), random.randrange(2**32))
    with pagefleet_serve(folder, "--model=echo", "--engine=echo", *_OPTIONS) as serving:
        yield EchoCell(serving, questions)


def test_no_request_hurts(cell):
    server, services = cell.servers[0], cell.services
    statuses, sent = Counter(), Counter()

    @settings(max_examples=settings.default.max_examples * 14)
    @given(st.lists(conversations(), min_size=1, max_size=_TOGETHER))
    def talk(together):
        exchanges = [Exchange.begin(each, (server.host, server.port)) for each in together]
        for exchange in exchanges:
            exchange.finish()
        for exchange in exchanges:
            statuses.update(exchange.judge())
        sent["requests"] += sum(each.count for each in together)

    cell.assert_serves()
    before, lag = cell.resident(), cell.lag()
    talk()
    after, lag = cell.resident(), cell.lag() - lag
    print(dict(sent), dict(statuses), before, after, dict(lag))
    assert cell.services == services
    assert all(after[name] < before[name] + _GROWTH_MIB for name in before)
    assert sum(lag[bound] for bound in lag if bound > _LAG_SECONDS) <= lag.total() / 100
    cell.assert_serves()
