"""Texts that are written while somebody reads them, and while nobody does."""

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest

from pagefleet.writer import MOST_WAITING, Writer

SAY = """
from pagefleet_launcher.saying import announce, say
say("who", "what \\ud800")
announce("so")
"""

SERVE = """
import logging, sys
from pagefleet.observe import configure_logging
from pagefleet.command_line import refuse
configure_logging("service")
for number in range(int(sys.argv[1])):
    logging.getLogger("any").info("line %06d", number)
"""

ENDS = {
    "refusal": ("refuse('service', 'no')", "service: no\n", 2),
    "exit": ("from pagefleet import writer; import os; writer.flush(); os._exit(3)", "", 3),
    "bug": ("raise ValueError('a bug')", "ValueError: a bug\n", 1),
    "end": ("", "", 0),
}
"""How a service ends: by what, with which last words and status."""


def test_all_that_was_said_is_out_when_the_process_has_ended() -> None:
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"so\n", b"        who | what ?\n")


@pytest.mark.parametrize("way", ENDS)
def test_all_that_was_logged_is_out_before_the_last_words(way: str) -> None:
    code, words, status = ENDS[way]
    command = [sys.executable, "-c", SERVE + code, "5000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    logged = [line[-11:] for line in done.stderr.splitlines()[:5000]]
    assert logged == [f"line {number:06}" for number in range(5000)]
    assert done.stderr.endswith(words or "line 004999\n")
    assert done.returncode == status


@pytest.mark.parametrize("way", ENDS)
def test_a_service_does_not_wait_for_who_reads_nothing(way: str) -> None:
    code, _, status = ENDS[way]
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as unread:
        command = [sys.executable, "-c", SERVE + code, "5000"]
        done = subprocess.run(command, stderr=unread, timeout=60, check=False)
    assert done.returncode == status


@pytest.mark.parametrize("program", [SAY, SERVE])
def test_a_full_disk_loses_what_is_said_and_nothing_else(program: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program, "10"]
        done = subprocess.run(command, stdout=full, stderr=full, check=False)
    assert done.returncode == 0


def test_nothing_is_written_to_what_has_the_number_of_a_closed_standard_error() -> None:
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh"]
    program = SERVE + "import os; print(os.readlink('/proc/self/fd/2'))"
    command = [*closed, sys.executable, "-c", program, "10"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "/dev/null\n"


@pytest.mark.parametrize("text", ["a line\n", "a long line" * 100_000 + "\n"])
def test_what_is_not_read_in_time_is_bounded_and_counted(text: str) -> None:
    reading, writing = os.pipe()
    writer, said = Writer(), 0
    with open(reading) as file, open(writing, "w"):
        while not writer.lost:
            writer.put(writing, text)
            said += 1
        assert (said - 2) * sys.getsizeof(text) <= MOST_WAITING + (1 << 20)
        lost = writer.lost
        heard = Counter(itertools.islice(file, said - lost))
        assert heard == {text: said - lost}
        writer.put(writing, "the next\n")
        note = f"({lost} lines are lost: nobody read them in time)\n"
        assert list(itertools.islice(file, 2)) == [note, "the next\n"]
        assert not writer.lost
