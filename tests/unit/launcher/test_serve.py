import http.server
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from pagefleet.command_line import parse
from pagefleet.host import usable_cores
from pagefleet.http_socket import http_socket
from pagefleet.manifest import FORMAT_VERSION, Manifest, SamplingDefaults, Weights
from pagefleet.prepared import preparation
from pagefleet.settings import GatewaySettings, SchedulerSettings, ServeSettings, WorkerSettings
from pagefleet_launcher import serve
from pagefleet_launcher.greeting import greeting, is_ready, reachable
from tests.processes import may_mount

CLASSES = {"scheduler": SchedulerSettings, "worker": WorkerSettings, "gateway": GatewaySettings}


def test_a_port_that_is_taken_is_one_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--port", str(port)]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"port {port} of 127.0.0.1 is in use by another program" in errors
    assert "--port" in errors


def test_a_host_that_is_none_is_one_sentence(capsys):
    assert serve.main(["--host", "999.1.1.1"]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "--host" in errors


def test_a_descriptor_that_is_no_socket_is_one_sentence(capsys, tmp_path):
    with (tmp_path / "file").open("w") as file:
        for fd in (file.fileno(), 1 << 20):
            assert serve.main([f"--fd={fd}"]) == 1
            errors = capsys.readouterr().err
            assert errors.count("\n") == 1
            assert f"--fd {fd} is no socket that was inherited" in errors


def test_no_socket_gets_the_number_of_a_standard_stream_that_was_closed():
    script = """
import os, socket
from pagefleet_launcher import serve
os.closerange(0, 3)
serve.open_standard_streams()
os._exit(socket.socket().fileno())
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 3


def test_the_sockets_are_where_the_user_s_belong(tmp_path_factory, monkeypatch):
    short = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    with serve.socket_folder() as folder:
        assert folder.parent == short


def test_too_few_descriptors_are_one_sentence(tmp_path_factory):
    """They suffice for the launcher, but not for a process of its."""
    command = [str(Path(sys.executable).parent / "pagefleet"), "serve", "--port=0"]
    few = ["prlimit", "--nofile=10", *command]
    environment = os.environ | {"TMPDIR": str(tmp_path_factory.mktemp("t"))}
    done = subprocess.run(few, env=environment, capture_output=True, text=True, check=False)
    said = "pagefleet serve: no process can be started: Too many open files.\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.fixture
def deep(tmp_path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    return deep


@pytest.mark.parametrize("base", ["/proc", "/nowhere", "deep", "", "relative", None])
def test_a_folder_that_will_not_do_is_left_alone(tmp_path_factory, deep, monkeypatch, base):
    short = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    monkeypatch.chdir(deep.parent)
    (deep.parent / "relative").mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if base is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep) if base == "deep" else base)
    with serve.socket_folder() as folder:
        assert folder.parent == short
    assert [*short.iterdir(), *deep.iterdir()] == []


def test_no_folder_that_will_do_is_one_sentence(deep, monkeypatch):
    for base, sentence in (("/proc", "^no folder .*; set TMPDIR"), (deep, "too long for Unix")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        with pytest.raises(serve.CannotServe, match=sentence):
            serve.socket_folder().__enter__()
    assert list(deep.iterdir()) == []


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def told(tmp_path, listener, *arguments):
    """What the services of such a cell read from their arguments, by name, and the children."""
    asked = parse(ServeSettings, arguments, env={})
    settings = serve.complete(asked, tmp_path / "model", tmp_path, listener)
    children = [child for stage in serve.stages(settings) for child in stage]
    read = {}
    for child in children:
        service = re.sub(r"-\d+$", "", child.name)
        assert child.command[:3] == [sys.executable, "-m", f"pagefleet_{service}"]
        read[child.name] = parse(CLASSES[service], child.command[3:], env={})
    return read, {child.name: child for child in children}


def test_services_are_told_where_to_meet_and_what_was_asked(tmp_path, listener):
    read, children = told(
        tmp_path, listener, "--workers=2", "--gateways=2", "--no-lookahead", "--block-size=32"
    )
    assert list(read) == ["scheduler", "worker-0", "worker-1", "gateway-0", "gateway-1"]
    scheduler, worker, gateway = read["scheduler"], read["worker-1"], read["gateway-1"]
    assert (
        scheduler.gateway_endpoint == gateway.gateway_endpoint == f"ipc://{tmp_path}/gateways.sock"
    )
    assert scheduler.worker_endpoint == worker.worker_endpoint == f"ipc://{tmp_path}/workers.sock"
    assert worker.model == gateway.model == str(tmp_path / "model")
    assert (scheduler.lookahead, worker.block_size) == (False, 32)
    assert gateway.fd == listener.fileno()
    assert list(children["gateway-0"].fds) == [listener.fileno()]


def test_workers_share_the_cores(tmp_path, listener):
    cores = usable_cores()
    assert told(tmp_path, listener)[0]["worker-0"].threads == cores
    assert told(tmp_path, listener, "--workers=64")[0]["worker-63"].threads == max(1, cores // 64)
    assert told(tmp_path, listener, "--workers=2", "--threads=1")[0]["worker-1"].threads == 1


def test_flags_of_other_servers_reach_the_service_that_they_are_for(tmp_path, listener):
    read, _ = told(
        tmp_path, listener, "--data-parallel-size=2", "--scheduling-policy=fcfs", "--seed=7"
    )
    assert list(read) == ["scheduler", "worker-0", "worker-1", "gateway-0"]
    assert read["scheduler"].scheduling_policy == "fcfs"
    assert read["gateway-0"].seed == 7


def test_workers_take_the_devices_in_turn(tmp_path, listener):
    read, _ = told(tmp_path, listener, "--workers=3", "--device=cuda:0,cuda:1")
    devices = [read[f"worker-{number}"].device for number in range(3)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0"]


def test_workers_of_several_ranks_take_as_many_devices(tmp_path, listener):
    several = ("--workers=2", "--tensor-parallel-size=2")
    for device, expected in (
        ("cuda:0,cuda:1,cuda:2,cuda:3", ["cuda:0,cuda:1", "cuda:2,cuda:3"]),
        ("cpu", ["cpu", "cpu"]),
    ):
        read, _ = told(tmp_path, listener, *several, f"--device={device}")
        assert [read[f"worker-{number}"].device for number in range(2)] == expected


def test_the_parts_of_a_model_are_chosen_once(tmp_path, listener):
    chosen = ("--tokenizer=other", "--generation-config=none")
    assert set(chosen) < set(preparation(parse(ServeSettings, chosen, env={})))
    _, children = told(tmp_path, listener, *chosen)
    for name in ("worker-0", "gateway-0"):
        # Said, lest a variable of the launcher's that a service inherits should say otherwise.
        assert {"--tokenizer=auto", "--generation-config=auto"} < set(children[name].command)


def test_endpoints_that_were_asked_for_are_kept(tmp_path, listener):
    read, _ = told(tmp_path, listener, "--worker-endpoint=ipc:///elsewhere/workers")
    assert read["worker-0"].worker_endpoint == "ipc:///elsewhere/workers"
    assert read["gateway-0"].gateway_endpoint == f"ipc://{tmp_path}/gateways.sock"


def test_secrets_are_not_among_the_arguments(tmp_path, listener):
    read, children = told(tmp_path, listener, "--api-key=secret", "--resume-secret=another")
    assert read["gateway-0"].api_key is None
    assert read["gateway-0"].resume_secret is None
    assert children["gateway-0"].environment == {
        "PAGEFLEET_API_KEY": "secret",
        "PAGEFLEET_RESUME_SECRET": "another",
    }
    assert not children["worker-0"].environment


def test_gateways_can_resume_each_other_s_streams(tmp_path, listener):
    _, children = told(tmp_path, listener, "--gateways=2")
    drawn = [
        children[f"gateway-{number}"].environment["PAGEFLEET_RESUME_SECRET"] for number in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 64


@pytest.mark.parametrize(
    ("address", "reached"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1")],
)
def test_a_socket_is_reachable_from_this_machine(address, reached):
    with http_socket(GatewaySettings(host=address, port=0)) as s:
        host, port = reachable(s)
        assert host == reached
        socket.create_connection((host, port)).close()


class Gateway(http.server.BaseHTTPRequestHandler):
    """A gateway's stand-in: ready from the third question on; answers with what it was sent."""

    asked = 0

    def do_GET(self):
        type(self).asked += 1
        self.send_response(200 if self.path == "/ready" and self.asked > 2 else 503)
        self.end_headers()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        told = [self.path, self.headers["Content-Type"], self.headers["Authorization"]]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([*told, json.loads(body)]).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def gateway():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.socket
        server.shutdown()
        thread.join()


def test_readiness_is_what_the_gateway_says(gateway):
    host, port = reachable(gateway)
    assert [is_ready(host, port) for _ in range(3)] == [False, False, True]


def test_nobody_there_is_not_ready(listener):
    host, port = reachable(listener)
    listener.close()
    assert not is_ready(host, port)


def test_a_key_is_told_to_all_and_gateways_make_their_secret_of_it(tmp_path, listener):
    key = f"--cell-key={tmp_path}/key"
    read, children = told(tmp_path, listener, key, "--listen-workers=tcp://0.0.0.0:5557")
    assert {settings.cell_key for settings in read.values()} == {f"{tmp_path}/key"}
    assert read["scheduler"].listen_workers == "tcp://0.0.0.0:5557"
    assert read["worker-0"].worker_endpoint.startswith("ipc://")
    assert children["gateway-0"].environment == {}


def test_a_key_that_is_none_is_said_before_all_else(tmp_path, capsys):
    assert serve.main([f"--cell-key={tmp_path}/key", "--port=0"]) == 1
    said = capsys.readouterr().err
    assert f"pagefleet serve: the cell's key {tmp_path}/key cannot be read" in said


def test_the_greeting_says_how_other_machines_join(tmp_path, listener):
    write_model(tmp_path, True)
    asked = parse(
        ServeSettings,
        [
            *("--model=a-model", "--cell-key=cell.key", "--dtype=float32", "--threads=1"),
            *("--listen-workers=tcp://*:5557", "--listen-gateways=tcp://10.1.2.3:5556"),
            *("--device=cuda:0,cuda:1", "--api-key=secret", "--resume-secret=hidden"),
        ],
        env={},
    )
    settings = serve.complete(asked, tmp_path, tmp_path, listener)
    said = greeting(asked, settings, *reachable(listener), 3.21)
    assert "secret" not in said
    assert "hidden" not in said
    worker, gateway = (line.split() for line in said.splitlines() if line.startswith("  pagefleet"))
    assert (worker[1], gateway[1]) == ("worker", "gateway")
    far = parse(WorkerSettings, worker[2:], env={})
    assert far.worker_endpoint == f"tcp://{socket.getfqdn()}:5557"
    assert (far.model, far.dtype, far.cell_key) == ("a-model", "float32", "cell.key")
    assert (far.device, far.threads) == ("auto", None)
    far = parse(GatewaySettings, gateway[2:], env={})
    assert far.gateway_endpoint == "tcp://10.1.2.3:5556"
    assert (far.model, far.cell_key) == ("a-model", "cell.key")


NAMELESS = """
import socket, subprocess, sys
from pathlib import Path
from pagefleet.settings import ServeSettings
from pagefleet_launcher.greeting import greeting

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
socket.sethostname("unknown-to-all")
with socket.socket(type=socket.SOCK_DGRAM) as name_server:
    name_server.bind(("127.0.0.1", 53))
    name_server.setblocking(False)
    asked = ServeSettings(model=sys.argv[1])
    greeting(asked, asked, "127.0.0.1", 8000, 1.0)
    try:
        print(name_server.recv(512))
    except BlockingIOError:
        print("never asked")
"""


@pytest.mark.skipif(not may_mount(), reason="a process may mount nothing here")
def test_no_name_server_is_asked_where_no_other_machine_may_join(tmp_path):
    """One that does not answer would hold the launcher up for ten seconds."""
    write_model(tmp_path, True)
    hosts, resolver = tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text("127.0.0.1 localhost\n")
    resolver.write_text("nameserver 127.0.0.1\n")
    shell = f"mount --bind {hosts} /etc/hosts && mount --bind {resolver} /etc/resolv.conf && "
    shell += 'exec "$@"'
    command = ["unshare", "--mount", "--net", "--uts", "sh", "-c", shell, "sh", sys.executable]
    command += ["-c", NAMELESS, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert told.stdout == "never asked\n"


def write_model(folder, chat):
    Manifest(
        format_version=FORMAT_VERSION,
        name="it's a model",
        architecture="llama",
        weights=Weights("none"),
        vocab_size=10,
        max_model_len=100,
        bos_token=None,
        eos_token=None,
        eos_token_ids=(0,),
        sampling=SamplingDefaults(),
        fingerprint="00",
    ).save(folder)
    if chat:
        (folder / "chat_template.jinja").touch()


@pytest.mark.parametrize("chat", [True, False])
def test_the_commands_of_the_greeting_work_when_pasted(tmp_path, gateway, chat):
    write_model(tmp_path, chat)
    asked = parse(ServeSettings, ["--api-key=secret", "--dtype=float32"], env={})
    settings = serve.complete(asked, tmp_path, tmp_path, gateway)
    lines = greeting(asked, settings, *reachable(gateway), 3.21).splitlines()
    assert lines[1].endswith(" (ready after 3.2 s)")
    curl = next(line for line in lines if line.startswith("  curl"))
    environment = {**os.environ, "PAGEFLEET_API_KEY": "secret"}
    answer = subprocess.run(
        ["bash", "-c", f"{curl} --silent"], env=environment, capture_output=True, check=True
    )
    path, kind, key, body = json.loads(answer.stdout)
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert (kind, key) == ("application/json", "Bearer secret")
    assert body["model"] == "it's a model"
    assert body.keys() == {"model", "temperature", "messages" if chat else "prompt"}

    pagefleet, command, url = shlex.split(next(line for line in lines if " chat --" in line))
    assert os.path.isabs(pagefleet)
    assert (command, url) == ("chat", "--url=http://{}:{}".format(*reachable(gateway)))

    _, service, *arguments = shlex.split(next(line for line in lines if "worker --" in line))
    assert service == "worker"
    worker = parse(WorkerSettings, arguments, env={})
    assert worker.worker_endpoint == f"ipc://{tmp_path}/workers.sock"
    assert (worker.model, worker.dtype) == (str(tmp_path), "float32")
