"""What holds for every route: names, keys, limits of tenants, origins, prefixes, and the log."""

import asyncio
import hashlib
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.app import build_app, build_gateway
from pagefleet_gateway.model import ServedModel
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.fake_scheduler import FakeScheduler
from tests.unit.gateway.served import echo_model

PATHS = ["/v1/models", "/metrics", "/version", "/status", "/openapi.json", "/nowhere"]


def ask(
    *requests: tuple[str, str, dict[str, Any]], model: ServedModel | None = None, **fields: Any
) -> list[httpx.Response]:
    """What an application with these settings answers, one request after the other."""
    fields = {"gateway_endpoint": "ipc:///nowhere/gateways.sock"} | fields
    gateway = build_gateway(GatewaySettings(**fields), model or echo_model())

    async def talk() -> list[httpx.Response]:
        transport = httpx.ASGITransport(build_app(gateway))
        async with (
            gateway.client.running(),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return [await client.request(method, path, **more) for method, path, more in requests]

    try:
        return asyncio.run(talk())
    finally:
        gateway.threads.shutdown()


def get(path: str, **headers: str) -> tuple[str, str, dict[str, Any]]:
    return "GET", path, {"headers": headers}


def tokenize(key: str | None = None, text: str = "hello") -> tuple[str, str, dict[str, Any]]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return "POST", "/tokenize", {"json": {"prompt": text}, "headers": headers}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys.json"
    entries = [
        {"name": "a", "sha256": hashlib.sha256(b"one").hexdigest(), "requests_per_minute": 2},
        {"name": "b", "sha256": hashlib.sha256(b"root").hexdigest(), "admin": True},
    ]
    file.write_text(json.dumps({"keys": entries}))
    return str(file)


def test_keys_are_asked_for_everywhere_but_where_there_is_no_data(keys: str) -> None:
    for response in ask(*map(get, PATHS), tokenize(), tokenize("two"), api_key_file=keys):
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    live, page, ready = ask(get("/live"), get("/"), get("/ready"), api_key_file=keys)
    assert (live.status_code, page.status_code, ready.status_code) == (200, 200, 503)
    assert ready.json()["error"]["code"] == "no_scheduler"


def test_a_key_may_come_as_clients_of_anthropic_send_it(keys: str) -> None:
    def metrics(**headers: str) -> tuple[str, str, dict[str, Any]]:
        return get("/metrics", **{name.replace("_", "-"): key for name, key in headers.items()})

    asked = [
        (metrics(x_api_key="root"), 200),
        (metrics(x_api_key="one"), 403),
        (metrics(x_api_key="Bearer root"), 401),
        (metrics(x_api_key=""), 401),
        (metrics(x_api_key="root", authorization="Bearer wrong"), 200),
        (metrics(x_api_key="wrong", authorization="Bearer root"), 200),
        (metrics(x_api_key="root", authorization="Bearer one"), 403),
        (metrics(x_api_key="wrong", authorization="Bearer wrong"), 401),
    ]
    answers = ask(*(request for request, _ in asked), api_key_file=keys)
    assert [answer.status_code for answer in answers] == [status for _, status in asked]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_refusals_have_the_form_of_the_route(keys: str, path: str) -> None:
    def post(key: str, **more: str) -> tuple[str, str, dict[str, Any]]:
        return "POST", path, {"json": {}, "headers": {"x-api-key": key, **more}}

    first, *others, last = ask(post("two"), *[post("one")] * 3, api_key_file=keys)
    assert (first.status_code, first.json()["error"]["type"]) == (401, "authentication_error")
    assert [answer.status_code for answer in others] == [400, 400]
    assert (last.status_code, last.json()["error"]["type"]) == (429, "rate_limit_error")
    assert last.json()["request_id"] == last.headers["request-id"]
    (compressed,) = ask(("POST", path, {"headers": {"content-encoding": "gzip"}}))
    assert (compressed.status_code, compressed.json()["type"]) == (415, "error")


def test_a_tenant_over_its_limit_is_told_when_to_come_back(keys: str) -> None:
    began = time.monotonic()
    responses = ask(
        *[tokenize("one")] * 3, get("/metrics", authorization="Bearer root"), api_key_file=keys
    )
    took = time.monotonic() - began
    assert [response.status_code for response in responses] == [200, 200, 429, 200]
    assert 30 - took <= int(responses[2].headers["retry-after"]) <= 30
    assert responses[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 'pagefleet_tenant_requests_total{status="429",tenant="a"} 1.0' in responses[3].text


@pytest.mark.parametrize("path", ["/metrics", "/memory"])
def test_what_tells_of_all_tenants_is_for_admins(keys: str, path: str) -> None:
    refused, shown = (get(path, authorization=f"Bearer {key}") for key in ("one", "root"))
    answers = ask(refused, shown, api_key_file=keys)
    assert answers[0].status_code == 403
    assert answers[0].json()["error"]["code"] == "not_admin"
    assert answers[1].status_code in (200, 503)
    (single,) = ask(get("/metrics", authorization="Bearer secret"), api_key="secret")
    assert single.status_code == 200


def test_the_page_is_for_people() -> None:
    (page,) = ask(get("/"))
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    (status,) = ask(get("/status"))
    assert status.json()["state"] == "No scheduler answers."


def test_pages_of_allowed_origins_may_ask() -> None:
    wanted = "anthropic-dangerous-direct-browser-access,anthropic-version,x-api-key"
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = wanted
    options = "OPTIONS", "/v1/messages", {"headers": preflight}
    fields: dict[str, Any] = {
        "allowed_origins": "https://a.example, https://b.example",
        "api_key": "secret",
    }
    asked, seen, other = ask(
        options,
        get("/v1/models", origin="https://b.example"),
        get("/v1/models", origin="https://c.example"),
        **fields,
    )
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://a.example"
    assert asked.headers["access-control-allow-headers"] == wanted
    assert (seen.status_code, seen.headers["access-control-allow-origin"]) == (
        401,
        "https://b.example",
    )
    assert "access-control-allow-origin" not in other.headers
    (unasked,) = ask(get("/live", origin="https://a.example"))
    assert "access-control-allow-origin" not in unasked.headers


def test_pages_may_read_whether_to_ask_again() -> None:
    error = ApiError(503, "Not today.", type="server_error", retry_after=1, final=True)
    told = {name.decode() for name, _ in error.headers(b"")} - {"content-type", "content-length"}
    assert len(told) == 2
    asked = get("/live", origin="https://a.example")
    (live,) = ask(asked, allowed_origins="https://a.example")
    exposed = live.headers["access-control-expose-headers"].lower().split(", ")
    assert {*told, "x-request-id", "request-id", "x-ignored-fields"} == {*exposed}


def test_pages_may_read_that_there_is_a_bug() -> None:
    settings = GatewaySettings(
        gateway_endpoint="ipc:///nowhere/gateways.sock", allowed_origins="https://a.example"
    )
    gateway = build_gateway(settings, echo_model())
    gateway.threads.shutdown()
    del gateway.model

    async def ask_twice() -> list[httpx.Response]:
        transport = httpx.ASGITransport(build_app(gateway), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            origins = ("https://a.example", "https://c.example")
            return [await client.get("/v1/models", headers={"origin": each}) for each in origins]

    allowed, other = asyncio.run(ask_twice())
    assert (allowed.status_code, allowed.json()["error"]["type"]) == (500, "server_error")
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in other.headers


def test_pages_of_the_internet_may_ask_a_private_network_if_they_are_allowed() -> None:
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    options = "OPTIONS", "/v1/completions", {"headers": preflight}
    (asked,) = ask(options, allowed_origins="https://a.example")
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/llm/live", 200), ("/live", 200), ("/llm", 200), ("/llmlive", 404), ("/llm/llm/live", 404)],
)
def test_a_proxys_prefix(path: str, status: int) -> None:
    (response,) = ask(get(path), root_path="/llm/")
    assert response.status_code == status


def test_a_prefix_opens_no_route(keys: str) -> None:
    paths = ["/llm/v1/models", "/llm/live/x", "/livex", "/llm//"]
    for response in ask(*map(get, paths), root_path="/llm", api_key_file=keys):
        assert response.status_code == 401


def test_a_line_for_each_request(keys: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagefleet_gateway.http.edge")
    requests = [tokenize("one", "a secret text"), get("/live"), tokenize("two"), tokenize("one")]
    requests[-1][2]["headers"]["x-request-id"] = 'mine "x"'
    ask(*requests, api_key_file=keys)
    lines = [record.message for record in caplog.records if record.name.endswith("edge")]
    assert len(lines) == 3
    assert re.search(r"method=POST path=/tokenize status=200 seconds=\d+\.\d{3} ", lines[0])
    assert lines[0].endswith("tenant=a")
    assert re.search(r"status=401 seconds=\d+\.\d{3} error=invalid_api_key$", lines[1])
    assert lines[2].startswith('request="mine \\"x\\"" method=POST')
    assert "secret" not in "".join(lines)


@pytest.mark.parametrize("log_prompts", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_answers_are_logged_only_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, log_prompts: bool, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    scheduler = FakeScheduler(f"ipc://{tmp_path}/gateways.sock")
    body = {"prompt": "secret", "max_tokens": 6, "n": 2, "stream": stream}
    with scheduler.started():
        (response,) = ask(
            ("POST", "/v1/completions", {"json": body}),
            gateway_endpoint=scheduler.endpoint,
            log_prompts=log_prompts,
        )
    assert response.status_code == 200
    (line,) = [record.message for record in caplog.records if record.name.endswith("edge")]
    assert "prompt_tokens=6 generated_tokens=12" in line
    shown = 'prompts=["secret"] answers={"0":"terces","1":"ercest"}'
    assert (shown in line) == log_prompts
    assert ("secret" in caplog.text) == ("terces" in caplog.text) == log_prompts


def test_the_longest_sequence_is_bounded_before_any_worker_is_known() -> None:
    for fields, longest in (
        ({}, 4096),
        ({"max_model_len": 64}, 64),
        ({"max_model_len": 9999}, 4096),
    ):
        (answer,) = ask(get("/v1/models"), **fields)
        assert answer.json()["data"][0]["max_model_len"] == longest


def test_a_model_is_known_by_all_of_its_names(tmp_path: Path) -> None:
    folder = prepare("echo", tmp_path)
    asked = [("POST", "/tokenize", {"json": {"prompt": "a", "model": n}}) for n in ("b/c", "echo")]
    listed, entry, unknown, known, other = ask(
        *(get(path) for path in ("/v1/models", "/v1/models/b/c", "/v1/models/echo")),
        *asked,
        model=ServedModel.load(folder, "a,b/c"),
    )
    entries = listed.json()["data"]
    assert [(each["id"], each["root"]) for each in entries] == [("a", "echo"), ("b/c", "echo")]
    assert entry.json() == entries[1]
    assert [answer.status_code for answer in (unknown, known, other)] == [404, 200, 404]
