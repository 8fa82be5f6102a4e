"""Processes that begin with the session and are waited for by the test that is about them.

Triton's interpreter keeps a core busy for a minute. Most tests wait for other processes and for
timers, so that what is marked `early` costs next to nothing when it runs beside them.
"""

import subprocess
import sys
from collections.abc import Mapping
from os import environ

import pytest

Running = Mapping[str, "subprocess.Popen[str]"]

_RUNNING = pytest.StashKey[Running]()
"""By the id of the test."""


def pytest_configure(config: pytest.Config) -> None:
    """The mark."""
    text = "early(module, *arguments, **environment): `python -m` of it begins with the session"
    config.addinivalue_line("markers", text)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what the tests that will run are marked with."""
    if not session.config.option.collectonly:
        session.stash[_RUNNING] = {
            item.nodeid: subprocess.Popen(
                ["nice", sys.executable, "-m", *mark.args],
                cwd=session.config.rootpath,
                env=environ | mark.kwargs,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for item in session.items
            if (mark := item.get_closest_marker("early"))
        }


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what nobody waited for."""
    for process in session.stash.get(_RUNNING, {}).values():
        with process:
            process.kill()


@pytest.fixture
def early(request: pytest.FixtureRequest) -> "subprocess.CompletedProcess[str]":
    """What the test's process did and said, once it has ended."""
    process = request.session.stash[_RUNNING][request.node.nodeid]
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
