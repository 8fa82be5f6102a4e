"""`pagefleet serve` with the real services, and EchoEngine in place of a model."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.unit.launcher.conftest import is_alive, wait_until

COMMAND = [str(Path(sys.executable).parent / "pagefleet"), "serve", "--model=echo", "--engine=echo"]
REQUEST = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


class Serving:
    """A cell that is ready; `greeting` is what it said then."""

    def __init__(self, process, log):
        self.process, self.log = process, log
        self.greeting = wait_until(self._greeting, seconds=60)
        self.url = re.search(r"Pagefleet serves echo at (\S+)", self.greeting)[1]

    def _greeting(self):
        assert self.process.poll() is None, self.log.read_text()
        said = self.log.read_text()
        return said if "Ctrl-C ends it: " in said else None

    def children(self):
        """Pids of the services by their names."""
        pid = self.process.pid
        pids = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        commands = {p: Path(f"/proc/{p}/cmdline").read_text() for p in pids}
        return {re.search(r"pagefleet_(\w+)", command)[1]: p for p, command in commands.items()}

    def sockets(self):
        return Path(re.search(r"ipc://(\S+)", self.greeting)[1]).parent

    def answer(self):
        """The text of the whole answer to REQUEST, at once."""
        answer = httpx.post(f"{self.url}/v1/completions", json=REQUEST, timeout=30)
        return answer.json()["choices"][0]["text"]

    def stream(self):
        """The pieces of the answer to REQUEST, as they come."""
        body = {**REQUEST, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


@pytest.fixture
def serving(tmp_path):
    log = tmp_path / "log"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*COMMAND, "--port=0", "--step-seconds=0.02"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        ) as process,
    ):
        try:
            yield Serving(process, log)
        finally:
            process.terminate()


def test_the_line_to_paste_is_answered(serving):
    line = next(line for line in serving.greeting.splitlines() if line.startswith("  curl"))
    done = subprocess.run([*shlex.split(line), "--silent"], capture_output=True, check=True)
    assert json.loads(done.stdout)["model"] == "echo"


def test_an_open_stream_ends_before_the_cell_does(serving):
    expected, pieces = serving.answer(), []
    for piece in serving.stream():
        if not pieces:
            serving.process.send_signal(signal.SIGTERM)
        pieces.append(piece)
    assert "".join(pieces) == expected
    assert serving.process.wait(timeout=10) == 0
    assert not serving.sockets().exists()


def test_a_stream_outlives_the_other_services(serving):
    expected, pieces, before = serving.answer(), [], serving.children()
    for piece in serving.stream():
        pieces.append(piece)
        if len(pieces) == 5:
            os.kill(before["worker"], signal.SIGKILL)
        if len(pieces) == 15:
            os.kill(before["scheduler"], signal.SIGKILL)
    assert "".join(pieces) == expected
    after = serving.children()
    assert [name for name in before if before[name] == after[name]] == ["gateway"]


def test_no_service_outlives_a_killed_launcher(serving):
    children = serving.children().values()
    assert len(children) == 3
    serving.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in children), seconds=2)
    for path in serving.sockets().iterdir():
        path.unlink()
    serving.sockets().rmdir()
