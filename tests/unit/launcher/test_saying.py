"""Lines that are written while somebody reads them, and while nobody does."""

import itertools
import os
import subprocess
import sys
from collections import Counter

from pagefleet_launcher.saying import Writer

SAY = """
from pagefleet_launcher.saying import announce, say
say("who", "what \\ud800")
announce("so")
"""


def test_all_that_was_said_is_out_when_the_process_has_ended():
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"so\n", b"        who | what ?\n")


def test_a_full_disk_loses_what_is_said_and_nothing_else():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", SAY], stdout=full, stderr=full, check=False)
    assert done.returncode == 0


def test_what_is_not_read_in_time_is_counted():
    reading, writing = os.pipe()
    writer, said = Writer(), 0
    with open(reading) as file, open(writing, "w"):
        while not writer.lost:
            writer.put(writing, "a line\n")
            said += 1
        lost = writer.lost
        heard = Counter(itertools.islice(file, said - lost + 1))
    note = f"({lost} lines are lost: nobody read them in time)\n"
    assert heard == {"a line\n": said - lost, note: 1}
