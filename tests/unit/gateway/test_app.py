"""The gateway as its clients see it: a real process, real HTTP, and a scripted scheduler behind."""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from pagefleet.wire import Reason
from pagefleet_worker.prepare import prepare
from tests.processes import killed_in_the_end
from tests.unit.gateway.fake_scheduler import FakeScheduler, expected_token

ENOUGH = 10**3


@dataclass
class Cell:
    """A gateway process and the scheduler behind it."""

    url: str
    port: int
    process: "subprocess.Popen[bytes]"
    scheduler: FakeScheduler

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=fields, timeout=20)

    def stream(self, path: str = "/v1/completions", headers: Any = None, **fields: Any) -> Any:
        body = {"stream": True} | fields
        return httpx.stream("POST", self.url + path, json=body, headers=headers, timeout=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("echo", tmp_path_factory.mktemp("cache"))


@contextmanager
def running_gateway(model: Path, endpoint: str, *arguments: str) -> Iterator[Any]:
    """A gateway on an inherited socket; ends it if the test did not."""
    listener = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-m", "pagefleet_gateway", f"--model={model}"]
    command += [f"--fd={listener.fileno()}", f"--gateway-endpoint={endpoint}", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with killed_in_the_end(
        subprocess.Popen(command, pass_fds=[listener.fileno()], env=environment)
    ) as process:
        port = listener.getsockname()[1]
        listener.close()
        yield process, port
        process.terminate()
        process.wait(60)


@contextmanager
def running_cell(model: Path, folder: Path, *arguments: str) -> Iterator[Cell]:
    scheduler = FakeScheduler(f"ipc://{folder}/gateways.sock")
    with (
        scheduler.started(),
        running_gateway(model, scheduler.endpoint, *arguments) as (process, port),
    ):
        cell = Cell(f"http://127.0.0.1:{port}", port, process, scheduler)
        wait_until(lambda: httpx.get(cell.url + "/ready", timeout=20).status_code == 200)
        yield cell


@pytest.fixture(scope="module")
def shared_cell(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    with running_cell(model, tmp_path_factory.mktemp("cell")) as cell:
        yield cell


@pytest.fixture
def cell(shared_cell: Cell) -> Cell:
    scheduler = shared_cell.scheduler
    wait_until(lambda: not scheduler.running)
    scheduler.submits.clear()
    scheduler.aborts.clear()
    scheduler.step_seconds, scheduler.reject = 0.0, None
    return shared_cell


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def expected_text(prompt: str, count: int, choice: int = 0) -> str:
    tokens = list(prompt.encode())
    return bytes(expected_token(tokens, choice, p) for p in range(count)).decode()


def events(lines: Iterator[str]) -> list[Any]:
    """The JSON of a stream that ends as it should."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]


def error_of(response: httpx.Response) -> Any:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def test_a_completion(cell: Cell) -> None:
    response = cell.post(prompt="hello", max_tokens=12, zork=1)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "zork"
    assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]
    (choice,) = response.json()["choices"]
    assert choice["text"] == expected_text("hello", 12)


def test_a_stream_of_several_choices_and_prompts(cell: Cell) -> None:
    with cell.stream(prompt=["hello", "world!"], n=2, max_tokens=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        chunks = events(response.iter_lines())
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [
        expected_text(prompt, 30, index)
        for index, prompt in enumerate(["hello", "hello", "world!", "world!"])
    ]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_events_are_what_the_document_says(cell: Cell, path: str, asked: dict[str, Any]) -> None:
    document = httpx.get(f"{cell.url}/openapi.json").json()
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    event = content["text/event-stream"]["itemSchema"]["properties"]["data"]
    end, chunk = event["anyOf"]
    assert end == {"const": "[DONE]"}
    with cell.stream(path, **asked, max_tokens=5, stream_options={"include_usage": True}) as answer:
        chunks = events(answer.iter_lines())
    for each in chunks:
        jsonschema.validate(each, document | chunk["contentSchema"])


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/responses/input_tokens", {"input": "a"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_what_is_ignored_is_named_on_every_route(
    cell: Cell, path: str, asked: dict[str, Any]
) -> None:
    assert "x-ignored-fields" not in cell.post(path, **asked).headers
    unfit = {f"field{number}": number for number in range(20)} | {"é": 1}
    named = cell.post(path, **asked, zork=1, speed="fast", **unfit).headers["x-ignored-fields"]
    assert named.split(", ") == ["zork", "speed", *(f"field{i}" for i in range(14)), "..."]


def test_the_name_of_a_request_comes_back(cell: Cell) -> None:
    response = httpx.post(
        cell.url + "/v1/completions",
        json={"prompt": "a", "max_tokens": 1},
        headers={"x-request-id": "mine"},
    )
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "cmpl-mine"
    for path, status in (("/live", 200), ("/nowhere", 404), ("/v1/completions", 405)):
        response = httpx.get(cell.url + path, headers={"x-request-id": "other"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "other")
    unfit = httpx.get(cell.url + "/live", headers={"x-request-id": "a" * 129})
    assert len(unfit.headers["x-request-id"]) == 32


def test_a_stop_string_ends_the_choice_at_the_scheduler(cell: Cell) -> None:
    response = cell.post(prompt="abcdef", max_tokens=ENOUGH, stop="cb")
    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("fed", "cb")
    wait_until(lambda: bool(cell.scheduler.aborts) and not cell.scheduler.running)


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_leaves_is_aborted_at_once(cell: Cell, stream: bool) -> None:
    def aborted() -> float:
        text = httpx.get(cell.url + "/metrics").text
        found = re.search(r'vllm:request_success_total{.*finished_reason="abort".*} (.*)', text)
        return float(found[1]) if found else 0.0

    cell.scheduler.step_seconds, before = 0.02, aborted()
    asked = {"prompt": "hello", "max_tokens": ENOUGH, "stream": stream, "n": 2}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", cell.port)) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: bool(cell.scheduler.running))
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        left = time.monotonic()
    wait_until(lambda: bool(cell.scheduler.aborts))
    assert time.monotonic() - left < 5
    wait_until(lambda: not cell.scheduler.running)
    wait_until(lambda: aborted() == before + 2)


def test_a_scheduler_may_die_in_the_middle(model: Path, tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"ipc://{tmp_path}/gateways.sock", step_seconds=0.01)
    with running_gateway(model, scheduler.endpoint) as (_, port), contextlib.ExitStack() as first:
        first.enter_context(scheduler.started())
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"prompt": "hello", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=20) as response:
            lines = response.iter_lines()
            begun = [line for line in (next(lines) for _ in range(20)) if line]
            first.close()
            scheduler.running.clear()
            scheduler.epoch += 1
            with scheduler.started():
                chunks = events(iter([*begun, *lines]))
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == expected_text("hello", 60)
    assert [submit.attempt for submit in scheduler.submits] == [1, 2]


@pytest.mark.parametrize(("path", "status"), [("/version", b"200"), ("", b"200"), ("/x", b"404")])
def test_a_target_may_be_absolute(cell: Cell, path: str, status: bytes) -> None:
    head = f"GET http://any{path} HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", cell.port), timeout=20) as client:
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_in_chunks_for_those_who_know_them(cell: Cell, version: str) -> None:
    body = b'{"prompt": "abc", "max_tokens": 3, "stream": true}'
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", cell.port)) as client:
        client.sendall(b"%sContent-Length: %d\r\n\r\n%s" % (head.encode(), len(body), body))
        head, _, told = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert (b"\r\ntransfer-encoding: chunked" in head.lower()) == (version == "1.1")
    sizes = [line for line in told.split(b"\n") if line.endswith(b"\r")]
    assert bool(sizes) == (version == "1.1")
    assert told.count(b"data: {") == 3
    assert told.startswith(b"id: ") == told.endswith(b"data: [DONE]\n\n") == (version == "1.0")


def test_errors_have_one_form(cell: Cell) -> None:
    bad = cell.post(prompt="a", temperature=3)
    assert (bad.status_code, error_of(bad)["param"]) == (400, "temperature")
    assert cell.post(prompt="a", stream=True, temperature=3).status_code == 400
    unknown = cell.post(prompt="a", model="other")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    nowhere = httpx.get(cell.url + "/v1/nowhere")
    assert (nowhere.status_code, error_of(nowhere)["type"]) == (404, "invalid_request_error")
    method = httpx.get(cell.url + "/v1/completions")
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert error_of(method)["message"] == "/v1/completions does not take GET."
    model = httpx.get(cell.url + "/v1/models/other")
    assert (model.status_code, error_of(model)["param"]) == (404, "model")


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"no http\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nx: " + b"y" * 10**5, 431)],
)
def test_what_never_became_a_request_is_counted(cell: Cell, content: bytes, status: int) -> None:
    def counted() -> float:
        text = httpx.get(cell.url + "/metrics").text
        errors = rf'pagefleet_gateway_errors_total{{code="",status="{status}"}} (.*)'
        found = re.search(errors, text)
        return float(found[1]) if found else 0.0

    before = counted()
    with socket.create_connection(("127.0.0.1", cell.port)) as client:
        client.sendall(content)
        assert client.recv(100).startswith(b"HTTP/1.1 %d " % status)
    assert counted() == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_scheduler_is_a_status(cell: Cell, stream: bool) -> None:
    cell.scheduler.reject = Reason.OVERLOADED
    response = cell.post(prompt="a", stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert error_of(response)["message"] == "Not today."


@pytest.mark.parametrize("reason", [Reason.QUARANTINED, Reason.MOVED])
def test_the_openai_client_does_not_repeat_what_would_do_harm_again(
    cell: Cell, reason: Reason
) -> None:
    cell.scheduler.reject = reason
    with (
        openai.OpenAI(base_url=cell.url + "/v1", api_key="any", max_retries=2) as client,
        pytest.raises(openai.APIStatusError, match="Not today"),
    ):
        client.completions.create(model="echo", prompt="a")
    assert len(cell.scheduler.submits) == 1


def test_bodies_have_a_limit(cell: Cell) -> None:
    size = 2 * 2**20 + 1
    declared = httpx.post(cell.url + "/v1/completions", content=b"x" * size)
    assert (declared.status_code, error_of(declared)["code"]) == (413, "body_too_large")
    pieces = iter([b"x" * 2**20] * 3)
    undeclared = httpx.post(cell.url + "/v1/completions", content=pieces)
    assert undeclared.status_code == 413


def test_facts(cell: Cell) -> None:
    (model,) = httpx.get(cell.url + "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("echo", 4096)
    assert httpx.get(cell.url + "/v1/models/echo").json() == model
    assert httpx.get(cell.url + "/live").json() == {"status": "ok"}
    assert httpx.get(cell.url + "/health").json()["workers"] == 1
    assert "version" in httpx.get(cell.url + "/version").json()
    tokens = cell.post("/tokenize", prompt="hi").json()
    assert tokens == {"count": 2, "max_model_len": 4096, "tokens": [104, 105], "token_strs": None}
    assert cell.post("/detokenize", tokens=[104, 105]).json() == {"prompt": "hi"}
    status = httpx.get(cell.url + "/status").json()
    assert (status["state"], status["engines"][0]["blocks"]) == ("Serving.", 10)


def test_metrics(cell: Cell) -> None:
    def value(name: str, labels: str = 'engine="all",model_name="echo"') -> float:
        lines = httpx.get(cell.url + "/metrics").text.splitlines()
        named = f"{name}{{{labels}}} " if labels else f"{name} "
        (line,) = [line for line in lines if line.startswith(named)]
        return float(line.rpartition(" ")[2])

    names = {
        "vllm:generation_tokens_total": 14,
        "vllm:prompt_tokens_total": 5,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:request_decode_time_seconds_count": 1,
    }
    before = {name: value(name) for name in names}
    assert cell.post(prompt="hello", max_tokens=7, n=2).status_code == 200
    assert {name: value(name) - before[name] for name in names} == names
    engine = 'engine="3",model_name="echo"'
    wait_until(lambda: value("vllm:num_requests_running", engine) == 0)
    assert value("vllm:kv_cache_usage_perc", engine) == 0.4
    sizes = 'block_size="16",engine="3",model_name="echo",num_gpu_blocks="10"'
    assert value("vllm:cache_config_info", sizes) == 1
    counts = {
        "prefix_cache_queries": 100,
        "prefix_cache_hits": 60,
        "num_preemptions": 2,
        "spec_decode_num_draft_tokens": 50,
        "spec_decode_num_accepted_tokens": 40,
    }
    assert {name: value(f"vllm:{name}_total", engine) for name in counts} == counts
    assert value("pagefleet_blocks", f'{engine},state="free"') == 1
    steps = [value("vllm:iteration_tokens_total" + part) for part in ("_count", "_sum")]
    assert steps == [14, 500]
    names_of_faults = ("stale_results", "lost_workers", "migrations", "quarantines")
    assert [value(f"pagefleet_{name}_total", "") for name in names_of_faults] == [1, 2, 3, 4]
    recovery = [value("pagefleet_recovery_seconds" + part, "") for part in ("_count", "_sum")]
    assert recovery == [5, 6.5]


def test_the_openai_client(cell: Cell) -> None:
    client = openai.OpenAI(base_url=cell.url + "/v1", api_key="any", max_retries=0)
    assert [model.id for model in client.models.list()] == ["echo"]
    completion = client.completions.create(model="echo", prompt="hello", max_tokens=9, logprobs=1)
    assert completion.choices[0].text == expected_text("hello", 9)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.text_offset == list(range(9))
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="echo", messages=messages, max_completion_tokens=9, logprobs=True, top_logprobs=2
    )
    text = chat.choices[0].message.content
    assert text is not None
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert "".join(token.token for token in chat.choices[0].logprobs.content) == text
    with client.chat.completions.create(
        model="echo",
        messages=messages,
        max_completion_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="echo", prompt="a", n=99)
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_no_scheduler_is_no_health(model: Path, tmp_path: Path) -> None:
    with running_gateway(model, f"ipc://{tmp_path}/none.sock") as (_, port):
        url = f"http://127.0.0.1:{port}"
        for path in ("/health", "/ready"):
            response = httpx.get(url + path, timeout=20)
            assert (response.status_code, error_of(response)["code"]) == (503, "no_scheduler")
        assert httpx.get(url + "/live").status_code == 200


def test_a_worker_less_cell_is_not_ready(cell: Cell) -> None:
    cell.scheduler.workers = 0
    wait_until(lambda: httpx.get(cell.url + "/health").status_code == 503)
    assert error_of(httpx.get(cell.url + "/health"))["code"] == "no_worker"
    cell.scheduler.workers = 1
    wait_until(lambda: httpx.get(cell.url + "/health").status_code == 200)


def test_a_key_is_asked_for_on_all_routes_with_data(model: Path, tmp_path: Path) -> None:
    with running_cell(model, tmp_path, "--api-key=secret") as cell:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            response = httpx.get(cell.url + path)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        for key in ("Bearer other", "Basic secret", "secret", "Bearer"):
            response = httpx.get(cell.url + "/v1/models", headers={"authorization": key})
            assert response.status_code == 401
        with_key = httpx.get(cell.url + "/v1/models", headers={"authorization": "bearer secret"})
        assert with_key.status_code == 200


def test_a_template_may_be_another_than_the_models(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    with running_cell(model, tmp_path, f"--chat-template={template}") as cell:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert bytes(cell.post("/tokenize", **body).json()["tokens"]) == b"user=hi;"


TURNS = [{"role": role, "content": "abc" * 9} for role in ("user", "assistant", "user")]
CUT = {
    "/v1/completions": {"prompt": "x" * 200, "max_tokens": 9, "truncate_prompt_tokens": -1},
    "/v1/chat/completions": {"messages": TURNS, "truncate_prompt_tokens": -1},
    "/v1/responses": {"input": TURNS, "truncation": "auto", "max_output_tokens": 9},
    "/v1/embeddings": {"input": "x" * 200, "truncate_prompt_tokens": -1},
}


def test_what_is_cut_to_fit_waits_until_it_is_known_what_fits(model: Path, tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"ipc://{tmp_path}/gateways.sock", workers=0, longest=64)
    with (
        scheduler.started(),
        running_gateway(model, scheduler.endpoint) as (process, port),
        ThreadPoolExecutor() as threads,
    ):
        cell = Cell(f"http://127.0.0.1:{port}", port, process, scheduler)
        cut = [threads.submit(cell.post, path, **body) for path, body in CUT.items()]
        assert cell.post(prompt="x" * 200, max_tokens=9).status_code == 200
        assert [len(submit.prompt) // 4 for submit in scheduler.submits] == [200]
        scheduler.workers = 1
        assert [answer.result().status_code for answer in cut] == [200] * len(CUT)
    _, *submits = scheduler.submits
    lengths = [len(submit.prompt) // 4 + submit.params.max_tokens for submit in submits]
    assert 0 < min(lengths) <= max(lengths) == 64, lengths


def test_tenants_share_nothing_and_have_limits(model: Path, tmp_path: Path) -> None:
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **limits}
        for name, limits in {
            "a": {"concurrent_requests": 1},
            "b": {"max_priority": 0, "weight": 2.5},
        }.items()
    ]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    with running_cell(model, tmp_path, f"--api-key-file={file}") as cell:

        def complete(name: str, **fields: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {name}"}
            body = {"prompt": "hello", "max_tokens": 2} | fields
            return httpx.post(cell.url + "/v1/completions", json=body, headers=headers)

        assert [complete(name).status_code for name in "abc"] == [200, 200, 401]
        assert complete("a", cache_salt="x").status_code == 200
        submits = cell.scheduler.submits
        assert len({submit.salt for submit in submits}) == 3
        assert {(submit.tenant, submit.weight) for submit in submits} == {("a", 1.0), ("b", 2.5)}
        first = complete("b", priority=-1)
        assert (first.status_code, error_of(first)["param"]) == (400, "priority")
        cell.scheduler.step_seconds = 0.05
        with cell.stream(prompt="hello", headers={"authorization": "Bearer a"}) as response:
            assert response.status_code == 200
            refused = complete("a")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert complete("b").status_code == 200
        wait_until(lambda: complete("a").status_code == 200)


def test_https(model: Path, tmp_path: Path) -> None:
    certificate = Path(__file__).with_name("localhost.pem")
    endpoint = f"ipc://{tmp_path}/none.sock"
    with running_gateway(model, endpoint, f"--ssl-certfile={certificate}") as (_, port):
        trusting = ssl.create_default_context(cafile=str(certificate))
        response = httpx.get(f"https://localhost:{port}/live", verify=trusting, timeout=20)
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--ssl-certfile=/nowhere.pem", "/nowhere.pem"),
        ("--ssl-keyfile=/nowhere.pem", "--ssl-certfile"),
        ("--api-key-file=/nowhere.toml", "/nowhere.toml cannot be read"),
    ],
)
def test_what_it_cannot_serve_with_ends_the_start(model: Path, argument: str, reason: str) -> None:
    command = [sys.executable, "-m", "pagefleet_gateway", f"--model={model}", "--port=0", argument]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_draining_finishes_what_is_open(model: Path, tmp_path: Path) -> None:
    with running_cell(model, tmp_path) as cell:
        cell.scheduler.step_seconds = 0.02
        with cell.stream(prompt="hello", max_tokens=40, return_token_ids=True) as response:
            lines = response.iter_lines()
            begun = next(lines)
            cell.process.send_signal(signal.SIGTERM)
            chunks = events(iter([begun, *lines]))
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 40
        assert cell.process.wait(60) == 0


def test_draining_has_a_time(model: Path, tmp_path: Path) -> None:
    with running_cell(model, tmp_path, "--shutdown-timeout=0.3") as cell:
        cell.scheduler.step_seconds = 0.02
        with cell.stream(prompt="hello", max_tokens=ENOUGH) as response:
            lines = response.iter_lines()
            begun = next(lines)
            cell.process.send_signal(signal.SIGTERM)
            chunks = events(iter([begun, *lines]))
        assert "shutting down" in chunks[-1]["error"]["message"]
        assert cell.process.wait(60) == 0


def test_the_gateway_needs_no_heavy_library() -> None:
    script = (
        "import sys, pagefleet_gateway.__main__;"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
