"""`pagefleet tap` beside a cell that answers a question."""

import subprocess
import sys
from pathlib import Path

import httpx

from pagefleet_launcher.showing import UNREAD_STATUS
from tests.processes import killed_in_the_end
from tests.system.serving import pagefleet_serve

EXPECTED = {
    *("gateway > GatewayBeat", "gateway < Pulse", "gateway > Submit", "gateway < Outputs"),
    *("worker > WorkerBeat", "worker < Plan", "worker > Result"),
}


def test_the_traffic_of_a_request_is_shown(tmp_path):
    endpoint = f"ipc://{tmp_path}/tap"
    options = ["--model=echo", "--engine=echo", f"--tap-endpoint={endpoint}"]
    command = [str(Path(sys.executable).parent / "pagefleet"), "tap", endpoint]
    with (
        pagefleet_serve(tmp_path, *options, XDG_CACHE_HOME=str(tmp_path)) as serving,
        killed_in_the_end(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as tap,
    ):
        assert "Pulse" in "".join(tap.stdout.readline() for _ in range(10))
        body = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{serving.url}/v1/completions", json=body).json()
        missing, tokens = set(EXPECTED), " ".join(map(str, answer["choices"][0]["token_ids"]))
        shown = ""
        while missing or f"tokens=[{tokens.split()[-1]}]" not in shown:
            line = tap.stdout.readline()
            assert line
            _, side, _, direction, name, *_ = line.split()
            missing.discard(f"{side} {direction} {name}")
            shown += line
        tap.stdout.close()
        assert tap.wait(60) == UNREAD_STATUS
