"""OpenTelemetry traces: a span for each request, and in it one for each thing that it waited for.

    POST /v1/chat/completions    from its header to the end of its answer
        gateway                  its body is read and understood, its prompt tokenized
        queue                    it waits for a place at a worker
        prefill                  until its first token
        decode                   until its last

A request that names its place in a trace (`traceparent`, W3C Trace Context) is a part of that.
Spans are made when a request is over, out of its record, so that tokens cost nothing more. They go
to a collector over OTLP/HTTP; OpenTelemetry's environment variables mean what they do elsewhere.
"""

import os
import time
from threading import Thread
from typing import Final, Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from pagefleet_gateway.record import Record

FLUSH_SECONDS: Final = 3.0
"""That a gateway which ends waits for its collector."""

_CONTEXT = TraceContextTextMapPropagator()


class Tracer:
    """Reports requests to `provider`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pagefleet")

    @classmethod
    def connect(cls, endpoint: str | None) -> Self:
        """Report to the collector at this URL; to that of the environment where none is given."""
        named = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if named else {"service.name": "pagefleet-gateway"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def ended(self, scope: Scope, record: Record, now: float) -> None:
        """A request is over; `now` is of the record's clock."""
        since = time.time_ns() - round(1e9 * now)

        def at(moment: float) -> int:
            return since + round(1e9 * moment)

        carrier = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=_CONTEXT.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=_attributes(scope, record),
            start_time=at(record.began),
        )
        inside = set_span_in_context(span)
        for name, start, end in record.phases(now):
            self._tracer.start_span(name, inside, start_time=at(start)).end(at(end))
        if record.status >= 500 or record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(at(now))

    def close(self) -> None:
        """Report what is left, unless the collector takes too long."""
        flush = Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(FLUSH_SECONDS)


def _attributes(scope: Scope, record: Record) -> dict[str, AttributeValue]:
    """Names of OpenTelemetry's semantic conventions where they have one."""
    known: dict[str, AttributeValue] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "http.response.status_code": record.status,
        "pagefleet.request.id": record.id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generated_tokens,
    }
    if record.tenant.name:
        known["pagefleet.tenant"] = record.tenant.name
    if record.error is not None:
        known["error.type"] = record.error
    return known
