"""What can be checked of the unit without systemd: that it fits what the launcher does."""

import shlex
from configparser import RawConfigParser
from pathlib import Path

import pytest

from pagefleet.notify import BEAT_SECONDS
from pagefleet.settings import ServeSettings, parse
from pagefleet_launcher import serve

UNIT = Path(__file__).parents[3] / "compose/pagefleet.service"


@pytest.fixture
def service():
    unit = RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(UNIT)
    return unit["Service"]


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
