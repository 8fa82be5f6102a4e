"""What a process writes, and that none lives unwatched."""

import asyncio
import contextlib
import errno
import os
import selectors
import signal
import sys
from pathlib import Path
from typing import NoReturn

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


def test_a_process_that_has_ended_is_sent_nothing() -> None:
    """What it started in a session of its own keeps its output open, which `ended` still reads."""
    start = "import subprocess; subprocess.Popen(['sleep', '1'], start_new_session=True)"

    async def watch() -> None:
        process = Process("child", [sys.executable, "-W", "ignore", "-c", start])
        ended = asyncio.create_task(process.ended())
        while children() != before:
            await asyncio.sleep(0.01)
        assert not ended.done()
        process.send(signal.SIGTERM)
        process.kill()
        assert await ended == 0

    before = children()
    asyncio.run(watch())


class ScarceSelector(selectors.EpollSelector):
    """As where the user has no epoll watch left (`max_user_watches`) for files of one kind."""

    lacking = "none"

    def register(
        self, fileobj: "selectors._FileDescriptorLike", events: int, data: object = None
    ) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if self.lacking in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().register(fileobj, events, data)


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.mark.parametrize("kind", ["pidfd", "socket:"])
def test_a_process_that_cannot_be_watched_is_ended(kind: str) -> None:
    async def watch() -> None:
        process = Process("child", [sys.executable, "-c", "import time; time.sleep(600)"])
        selector.lacking = kind
        with pytest.raises(OSError, match="No space left"):
            await process.ended()
        await asyncio.sleep(0.05)

    before = children()
    selector = ScarceSelector()
    with contextlib.closing(asyncio.SelectorEventLoop(selector)) as loop:
        loop.run_until_complete(watch())
    assert children() == before


def test_a_process_without_a_descriptor_of_its_own_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(pid: int) -> NoReturn:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    async def start() -> None:
        Process("child", [sys.executable, "-c", "import time; time.sleep(600)"])

    before = children()
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files in system"):
        asyncio.run(start())
    assert children() == before
