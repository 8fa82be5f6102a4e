"""Says on standard error what a session did and what C libraries said when it died.

A library that aborts says why on standard error, which pytest has redirected into a file that is
lost with it; and the stack that Python prints then is longer than what one is shown of a log. So a
witness, whose own standard error is that file, is told which test begins. The session is gone when
the witness reads the end of that and the last line was not empty. A process of pytest-xdist has no
standard output.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

_WITNESS = """
import os, sys
test = ""
for line in sys.stdin:
    test = line.strip()
if test:
    print(f"\\npytest died in {test}", flush=True)
    if os.path.isfile("/proc/self/fd/2"):
        print(os.pread(2, 1 << 14, 0).decode(errors="replace"), flush=True)
"""

_ERRORS = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep standard error: nothing is redirected yet."""
    config.stash[_ERRORS] = os.dup(2)


@pytest.fixture(scope="session")
def witness(pytestconfig: pytest.Config) -> "Iterator[subprocess.Popen[str]]":
    """Lives as long as the session, or a moment longer."""
    with subprocess.Popen(
        [sys.executable, "-c", _WITNESS],
        stdin=subprocess.PIPE,
        stdout=pytestconfig.stash[_ERRORS],
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.write("\n")


@pytest.fixture(autouse=True)
def told(witness: "subprocess.Popen[str]", request: pytest.FixtureRequest) -> None:
    """Tell the witness which test begins."""
    assert witness.stdin is not None
    print(request.node.nodeid, file=witness.stdin, flush=True)
