"""What a process writes."""

import asyncio
import sys

import pytest

from pagefleet import writer
from pagefleet_launcher.process import LONGEST_LINE, Process

ENDLESS = "import os; [os.write(1, b'x' * 65536) for _ in range(50)]; os.write(1, b'\\nend')"


async def run(*arguments: str) -> int:
    return await Process("child", [sys.executable, *arguments]).ended()


def test_a_line_without_an_end_is_said_in_pieces(capfd: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(run("-c", ENDLESS)) == 0
    writer.flush()
    *pieces, last = [line.partition(" | ")[2] for line in capfd.readouterr().err.splitlines()]
    assert (len("".join(pieces)), last) == (50 * 65536, "end")
    assert all(len(piece) > LONGEST_LINE for piece in pieces[:-1])
    assert len(pieces) > 1
