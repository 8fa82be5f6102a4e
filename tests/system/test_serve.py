"""`pagefleet serve` with the real services, and EchoEngine in place of a model."""

import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
from pathlib import Path

import httpx
import pytest

from benchmarks.drill import processes
from benchmarks.drill.processes import is_alive
from pagefleet_launcher.folder import private_folder
from tests.system.serving import END_SECONDS, pagefleet_serve
from tests.unit.launcher.conftest import wait_until

REQUEST = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def serving(tmp_path):
    options = ["--model=echo", "--engine=echo", "--step-seconds=0.02", "--hang-timeout=1.5"]
    with pagefleet_serve(tmp_path, *options, XDG_CACHE_HOME=str(tmp_path)) as serving:
        yield serving


def children(serving):
    """Pids of the services by their names."""
    return {name: pid for pid, name in processes.children(serving.process.pid).items()}


def replaced(serving, before):
    """Names of the services that have other pids than `before`."""
    after = children(serving)
    return {name for name, pid in before.items() if after.get(name, pid) != pid}


def sockets(serving):
    return Path(re.search(r"ipc://(\S+)", serving.greeting)[1]).parent


def answer(serving):
    """The text of the whole answer to REQUEST, at once."""
    response = httpx.post(f"{serving.url}/v1/completions", json=REQUEST, timeout=30)
    return response.json()["choices"][0]["text"]


def stream(serving):
    """The pieces of the answer to REQUEST, as they come."""
    body = {**REQUEST, "stream": True}
    with httpx.stream("POST", f"{serving.url}/v1/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def test_the_line_to_paste_is_answered(serving):
    line = next(line for line in serving.greeting.splitlines() if line.startswith("  curl"))
    done = subprocess.run([*shlex.split(line), "--silent"], capture_output=True, check=True)
    assert json.loads(done.stdout)["model"] == "echo"


def test_an_open_stream_ends_before_the_cell_does(serving):
    expected, pieces = answer(serving), []
    for piece in stream(serving):
        if not pieces:
            serving.process.send_signal(signal.SIGTERM)
        pieces.append(piece)
    assert "".join(pieces) == expected
    assert serving.process.wait(END_SECONDS) == 0
    assert not sockets(serving).exists()


def test_a_stream_outlives_the_other_services(serving):
    expected, pieces, before = answer(serving), [], children(serving)
    for piece in stream(serving):
        pieces.append(piece)
        if len(pieces) == 5:
            os.kill(before["worker"], signal.SIGKILL)
        if len(pieces) == 15:
            os.kill(before["scheduler"], signal.SIGKILL)
    assert "".join(pieces) == expected
    wait_until(lambda: replaced(serving, before) == {"scheduler", "worker"})


def test_a_stream_outlives_hung_services(serving):
    """Stopped for good; the launcher kills and replaces them."""
    expected, pieces, before = answer(serving), [], children(serving)
    for piece in stream(serving):
        pieces.append(piece)
        if len(pieces) == 5:
            os.kill(before["scheduler"], signal.SIGSTOP)
        if len(pieces) == 15:
            os.kill(before["worker"], signal.SIGSTOP)
    assert "".join(pieces) == expected
    wait_until(lambda: replaced(serving, before) == {"scheduler", "worker"})


def test_a_hung_gateway_is_replaced(serving):
    """Who asks while it hangs is answered by the next one: the launcher holds the socket."""
    expected, hung = answer(serving), children(serving)["gateway"]
    os.kill(hung, signal.SIGSTOP)
    wait_until(lambda: not is_alive(hung))
    assert answer(serving) == expected


def test_whoever_supervises_the_launcher_is_told_that_it_is_ready(tmp_path):
    """As systemd wants it; the services talk to the launcher, not to systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address := str(tmp_path / "notify"))
        systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        systemd.settimeout(60)
        options = ["--model=echo", "--engine=echo"]
        environment = {"XDG_CACHE_HOME": str(tmp_path), "NOTIFY_SOCKET": address}
        with pagefleet_serve(tmp_path, *options, **environment) as serving:
            for _ in range(3):
                word, credentials, _, _ = systemd.recvmsg(100, socket.CMSG_SPACE(12))
                assert b"READY=1" in word.splitlines()
                assert struct.unpack("3i", credentials[0][2])[0] == serving.process.pid


def test_neither_services_nor_sockets_outlive_a_killed_launcher(serving):
    pids = children(serving).values()
    assert len(pids) == 3
    serving.process.kill()
    serving.process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    with private_folder(sockets(serving).parent):
        assert not sockets(serving).exists()
