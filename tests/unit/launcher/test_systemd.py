"""What can be checked of the unit without systemd: that it fits what the launcher does."""

import re
import shlex
from configparser import RawConfigParser
from pathlib import Path

import pytest

from pagefleet.command_line import parse
from pagefleet.notify import BEAT_SECONDS
from pagefleet.settings import ServeSettings, WorkerSettings
from pagefleet_launcher import serve

COMPOSE = Path(__file__).parents[3] / "compose"


def section(unit):
    """What systemd is told of a service."""
    parser = RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(COMPOSE / unit)
    return parser["Service"]


@pytest.fixture
def service():
    return section("pagefleet.service")


def test_it_starts_what_there_is(service):
    program, command, *options = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("pagefleet", "serve")
    parse(ServeSettings, options, env={})


def test_open_streams_have_the_time_that_the_launcher_gives_them(service):
    """And only the launcher is asked: workers that were too would end before the streams."""
    assert service["KillMode"] == "mixed"
    needed = ServeSettings().shutdown_timeout + serve._END_MARGIN
    assert float(service["TimeoutStopSec"]) > needed


def test_it_waits_for_the_first_word_and_then_for_each(service):
    assert service["Type"] == "notify"
    assert service["TimeoutStartSec"] == "infinity"
    assert float(service["WatchdogSec"]) >= 10 * BEAT_SECONDS


def test_a_worker_is_told_by_variables_where_its_cell_is():
    unit = section("pagefleet-worker.service")
    program, command, *options = shlex.split(unit["ExecStart"])
    assert (Path(program).name, command) == ("pagefleet", "worker")
    text = (COMPOSE / "pagefleet-worker.service").read_text()
    told = dict(re.findall(r"(PAGEFLEET_\w+)=(\S+?),?\s", text))
    worker = parse(WorkerSettings, options, env=told)
    assert worker.worker_endpoint.startswith("tcp://")
    assert worker.cell_key is not None
    assert (unit["Type"], unit["TimeoutStartSec"]) == ("notify", "infinity")
    assert float(unit["WatchdogSec"]) >= 10 * BEAT_SECONDS
