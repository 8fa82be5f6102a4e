"""Spans of requests: what they waited for, as part of their clients' traces."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.types import Receive, Scope, Send

from pagefleet_gateway.http.edge import Edge
from pagefleet_gateway.record import record_of
from pagefleet_gateway.telemetry.metrics import Metrics
from pagefleet_gateway.telemetry.tracing import Tracer
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.test_app import running_cell

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def spans_of(path: str = "/v1/completions", method: str = "POST", **learnt: Any) -> Any:
    """What is reported of one request; what its record learns is in seconds since it began."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        for name, value in learnt.items():
            is_moment = name in ("handed_over", "first_token", "last_token")
            setattr(record, name, record.began + value if is_moment else value)

    async def ignore(*_: Any) -> None:
        return None

    headers = [(b"traceparent", TRACEPARENT.encode()), (b"x-request-id", b"mine")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    edge = Edge(app, Metrics("m"), tracer=Tracer(provider))
    asyncio.run(edge(scope, ignore, ignore))
    return {span.name: span for span in exporter.get_finished_spans()}


def milliseconds(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1e6)


def test_a_request_is_parted_into_what_it_waited_for() -> None:
    before = time.time_ns()
    spans = spans_of(
        handed_over=1.0, queued=2.0, first_token=7.0, last_token=15.0, status=200, prompt_tokens=5
    )
    whole = spans.pop("POST /v1/completions")
    assert {name: milliseconds(span) for name, span in spans.items()} == {
        "gateway": 1000,
        "queue": 2000,
        "prefill": 4000,
        "decode": 8000,
    }
    starts = [spans[name].start_time for name in ("gateway", "queue", "prefill", "decode")]
    assert starts == sorted(starts)
    assert starts[0] == whole.start_time
    assert abs(whole.start_time - before) < 5e9
    assert all(span.parent.span_id == whole.context.span_id for span in spans.values())


def test_a_request_goes_on_its_clients_trace() -> None:
    whole = spans_of(status=200)["POST /v1/completions"]
    assert whole.kind is SpanKind.SERVER
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.attributes["pagefleet.request.id"] == "mine"
    assert whole.status.status_code is StatusCode.UNSET


def test_what_was_refused_waited_for_nothing_more() -> None:
    spans = spans_of(status=400, error="bad")
    assert spans.keys() == {"POST /v1/completions", "gateway"}
    whole = spans["POST /v1/completions"]
    assert whole.status.status_code is StatusCode.ERROR
    assert whole.attributes["error.type"] == "bad"
    assert spans_of(handed_over=0.0, status=503).keys() == {*spans, "queue"}


def test_what_has_no_body_is_not_traced() -> None:
    assert not spans_of("/health", "GET", status=200)


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """The URL of a small collector, and what it was sent."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_gateway_reports_to_the_collector_it_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    with collector() as (url, received):
        flags = [f"--otlp-traces-endpoint={url}"]
        if by == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
            flags = []
        with running_cell(prepare("echo", tmp_path), tmp_path, *flags) as cell:
            body = {"prompt": "abc", "max_tokens": 3}
            answer = httpx.post(
                f"{cell.url}/v1/completions", json=body, headers={"traceparent": TRACEPARENT}
            )
            assert answer.status_code == 200
        resources = [each for request in received for each in request.resource_spans]
        spans = [span for each in resources for part in each.scope_spans for span in part.spans]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    named = {span.name: span for span in spans}
    assert named.keys() == {"POST /v1/completions", "gateway", "queue", "prefill", "decode"}
    queue = named["queue"]
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 1000
    attributes = {each.key: each.value for each in named["POST /v1/completions"].attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 3
    service = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    assert service["service.name"] == "pagefleet-gateway"
