"""Gateways of one cell count together: the limits of keys, and metrics."""

import time
from hashlib import sha256
from pathlib import Path

import httpx

from tests.system.serving import pagefleet_serve

KEY, LIMIT = "a key", 4
KEYS = f"""
[[keys]]
name = "team"
sha256 = "{sha256(KEY.encode()).hexdigest()}"
requests_per_minute = {LIMIT}
"""
BEATS = 0.6
"""Seconds in which every gateway learns what the others counted."""


def test_requests_a_minute_at_two_gateways(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    options = ("--model=echo", "--engine=echo", "--gateways=2")
    keys = f"--api-key-file={tmp_path}/keys.toml"
    with pagefleet_serve(tmp_path, *options, keys) as serving:
        body = {"prompt": "Once", "max_tokens": 2}
        headers = {"authorization": f"Bearer {KEY}"}
        statuses = []
        began = time.monotonic()
        for _ in range(2 * LIMIT):  # each over a connection of its own, to whichever takes it
            answer = httpx.post(f"{serving.url}/v1/completions", json=body, headers=headers)
            statuses.append(answer.status_code)
            time.sleep(BEATS)
    taken = statuses.count(200)
    grown = (time.monotonic() - began) * LIMIT / 60
    assert set(statuses) == {200, 429}
    assert LIMIT <= taken <= LIMIT + 1 + grown  # one may begin before the last is told of


def test_metrics_of_two_gateways_are_those_of_the_port(tmp_path: Path) -> None:
    options = ("--model=echo", "--engine=echo", "--gateways=2")
    with pagefleet_serve(tmp_path, *options) as serving:
        body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
        for count in range(1, 9):
            assert httpx.post(f"{serving.url}/v1/completions", json=body).status_code == 200
            assert serving.figure("vllm:request_success_total") == count
            assert serving.figure("vllm:generation_tokens_total") == 3 * count
            assert serving.figure("vllm:e2e_request_latency_seconds_count") == count
