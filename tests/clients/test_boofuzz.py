"""boofuzz at a cell of real processes (`tests.fuzz.boofuzz_session`): every answer is one that the
API knows, nobody dies, and the next request gets its exact answer.
"""

import re
from collections.abc import Callable
from pathlib import Path

from tests.clients.conftest import SOURCES
from tests.fuzz.served import fuzzed_cell

GROWTH_MIB = 150
"""A regex of 65,535 characters takes a worker 25 MiB, and it may remember, and follow, a few."""


def test_no_request_hurts(run_client: Callable[..., str], tmp_path: Path) -> None:
    with fuzzed_cell(tmp_path) as cell, cell.unhurt(GROWTH_MIB):
        server = cell.servers[0]
        said = run_client(
            "boofuzz",
            "python",
            "-m",
            "tests.fuzz.boofuzz_session",
            server.host,
            str(server.port),
            PYTHONPATH=SOURCES,
        )
        print(said)
    cases = re.findall(r"^\w+: (\d+) cases", said, re.MULTILINE)
    assert sum(map(int, cases)) > 20_000
