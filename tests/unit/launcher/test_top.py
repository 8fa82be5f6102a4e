"""`pagefleet top` against a small real HTTP server, and against what the gateway really says."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from pagefleet.wire import CACHED_BLOCK, Snapshot, Wait, WaitingSequence, WorkerMemory
from pagefleet_gateway.http import memory as gateway_memory
from pagefleet_launcher.cli import main
from pagefleet_launcher.showing import UNREAD_STATUS
from pagefleet_launcher.top import CLEAR, REASONS, Memory, render
from tests.processes import killed_in_the_end

POOL = WorkerMemory(
    3, 2, 8, 16, 7, 2, 1, {1: 2, 3: 1, 12: 1}, 16, 0, 0, 5, 2, 9, 4,
    bytes([0, 0, CACHED_BLOCK, 1, 1, 3, 12]),
)  # fmt: skip
BODY = msgspec.json.encode(
    gateway_memory.Memory.of(
        Snapshot(
            1,
            1,
            [POOL],
            [WaitingSequence(f"r{n}", [0, 2], 1.5, 20, 1, Wait.BLOCKS, 6, 5) for n in range(30)],
        )
    )
)


@dataclass
class Gateway:
    """Answers `/memory`; `asked` are the paths and keys that came."""

    url: str = ""
    status: int = 200
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with serving(Gateway()) as served:
        yield served


@contextmanager
def serving(gateway: Gateway) -> Iterator[Gateway]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            gateway.asked.append((self.path, self.headers["Authorization"]))
            self.send_response(gateway.status)
            self.end_headers()
            self.wfile.write(BODY)

        def log_message(self, *args: object) -> None:
            """Stay silent."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    gateway.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_plain_text_is_printed_once(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEFLEET_API_KEY", "secret")
    assert main(["top", "--blocks", "--url", gateway.url + "/"]) == 0
    assert gateway.asked == [("/memory?blocks=true", "Bearer secret")]
    lines = capsys.readouterr().out.splitlines()
    for word in ("2/8", "1 by 3, 1 by 12", "16 (25.0%)"):
        assert word in lines[1]
    assert "..c113+" in lines
    assert sum("wants 6 blocks, 5 are there" in line for line in lines) == 20
    assert lines[-1] == "and 10 more wait"


def test_on_a_terminal_it_is_shown_again(gateway: Gateway) -> None:
    main_end, terminal = pty.openpty()
    program = "import sys; from pagefleet_launcher.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "top", "--url", gateway.url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = b""
    with (
        os.fdopen(main_end, "rb", buffering=0) as screen,
        killed_in_the_end(subprocess.Popen(command, stdout=terminal, env=environment)) as process,
    ):
        os.close(terminal)
        while shown.count(CLEAR.encode()) < 2:
            shown += screen.read(1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert len(gateway.asked) >= 2


def test_a_reader_that_is_gone_is_not_the_gateway_s_fault(gateway: Gateway) -> None:
    program = "import sys; from pagefleet_launcher.cli import main; sys.exit(main())"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as unread:
        ended = subprocess.run(
            [sys.executable, "-c", program, "top", "--url", gateway.url],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=unread,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (UNREAD_STATUS, b"")


def test_an_error_is_told_in_a_sentence(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.status = 503
    for url, sentence in (
        (gateway.url, "Service Unavailable; is this the address of a gateway?"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer: nothing listens there"),
    ):
        assert main(["top", "--url", url]) == 1
        assert sentence in capsys.readouterr().err


def test_every_reason_is_in_words() -> None:
    assert REASONS.keys() == set(Wait)


def test_an_idle_cell_has_no_waste() -> None:
    idle = json.loads(BODY)["workers"][0] | {"holders": {}, "empty_slots": 0, "map": ""}
    memory = msgspec.convert({"workers": [idle], "waiting": []}, Memory, strict=False)
    assert "0 (0.0%)" in render(memory, rows=3)
    assert "waiting" not in render(memory, rows=3)
