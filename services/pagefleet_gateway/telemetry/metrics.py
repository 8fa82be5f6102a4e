"""Prometheus metrics of a gateway, under the names and labels of vLLM where it has them.

Dashboards and routers made for vLLM find here what a gateway knows: requests, tokens, latencies as
clients see them. `engine` is `all` in these, because a gateway does not see which worker served a
request. What is ours alone is under `pagefleet_`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, generate_latest

from pagefleet.wire import Finish
from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.cell.client import SchedulerClient
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.record import Record
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.telemetry.cell_metrics import CellCollector, LinkCollector
from pagefleet_gateway.telemetry.dashboard import Rate
from pagefleet_gateway.telemetry.metrics_exchange import Sums
from pagefleet_gateway.telemetry.tally import CounterTally, HistogramTally

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# The buckets of vLLM, so that quantiles from a mixed fleet can be compared.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_BETWEEN_TOKENS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Metrics:
    """All metrics of one gateway process."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._of_cell = CollectorRegistry()
        """What every gateway of the cell exports alike."""
        self._labels = {"model_name": model, "engine": "all"}
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _FIRST_TOKEN
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two arrivals of a choice.", _BETWEEN_TOKENS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _WHOLE
        )
        self._phases = {
            name: self._histogram(f"request_{name}_time_seconds", help, _WHOLE)
            for name, help in (
                ("queue", "From a request's arrival at the scheduler until it first ran."),
                ("prefill", "From then to its first token."),
                ("decode", "From its first token to its last."),
            )
        }
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKENS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of all requests.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._success = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            (*self._labels, "finished_reason"),
            registry=self.registry,
        )
        self.generated = Rate()
        self.event_loop_lag = HistogramTally(
            "pagefleet_event_loop_lag_seconds", "How late the event loop wakes a task.", {}, _LAG
        )
        self.registry.register(self.event_loop_lag)
        self._tenant_requests = Counter(
            "pagefleet_tenant_requests",
            "Requests of a key, by status.",
            ("tenant", "status"),
            registry=self.registry,
        )
        self._tenant_tokens = Counter(
            "pagefleet_tenant_tokens",
            "Tokens of a key's prompts and answers.",
            ("tenant", "kind"),
            registry=self.registry,
        )
        self._lora_requests = Counter(
            "pagefleet_lora_requests",
            "Requests of a LoRA adapter, by status.",
            ("lora", "status"),
            registry=self.registry,
        )
        self._lora_tokens = Counter(
            "pagefleet_lora_tokens",
            "Tokens of a LoRA adapter's prompts and answers.",
            ("lora", "kind"),
            registry=self.registry,
        )
        self._errors = Counter(
            "pagefleet_gateway_errors",
            "Requests answered with an error, by status and code.",
            ("status", "code"),
            registry=self.registry,
        )

    def watch(self, client: SchedulerClient) -> None:
        """Export what the link to the scheduler knows, as of each scrape."""
        self.registry.register(LinkCollector(client))
        self._of_cell.register(CellCollector(client, self._labels["model_name"]))

    def answered(self, record: Record) -> None:
        """Count a request that is over, by its tenant and its LoRA adapter too where it has one."""
        if record.status >= 400 or record.error:
            self._errors.labels(str(record.status), record.error or "").inc()
        if tenant := record.tenant.name:
            self._tenant_requests.labels(tenant, str(record.status)).inc()
            self._tenant_tokens.labels(tenant, "prompt").inc(record.prompt_tokens)
            self._tenant_tokens.labels(tenant, "generated").inc(record.generated_tokens)
        if lora := record.adapter:
            self._lora_requests.labels(lora, str(record.status)).inc()
            self._lora_tokens.labels(lora, "prompt").inc(record.prompt_tokens)
            self._lora_tokens.labels(lora, "generated").inc(record.generated_tokens)

    def refused(self, error: ApiError) -> None:
        """Count what was refused before it was a request."""
        self._errors.labels(str(error.status), error.code or "").inc()

    def phases(self, phases: Iterable[tuple[str, float, float]]) -> None:
        """Count the parts of a request that was answered (`Record.phases`)."""
        for name, start, end in phases:
            if name in self._phases:
                self._phases[name].observe(end - start)

    def finished(self, reason: str) -> None:
        """Count a choice that ended."""
        self._success.labels(*self._labels.values(), reason).inc()

    def own(self) -> bytes:
        """Those of this gateway alone, as text."""
        return generate_latest(self.registry)

    def render(self, gateways: Sequence[str] = ()) -> bytes:
        """The text that Prometheus scrapes; `gateways`: what each that shares our port has."""
        own = self.own() if not gateways else generate_latest(Sums(gateways))
        return own + generate_latest(self._of_cell)

    def _counter(self, name: str, help: str) -> CounterTally:
        tally = CounterTally(f"vllm:{name}", help, self._labels)
        self.registry.register(tally)
        return tally

    def _histogram(self, name: str, help: str, bounds: Sequence[float]) -> HistogramTally:
        tally = HistogramTally(f"vllm:{name}", help, self._labels, bounds)
        self.registry.register(tally)
        return tally


@dataclass
class RequestTimer:
    """Measures one request. Times are of any monotonic clock, in seconds."""

    metrics: Metrics
    record: Record
    answer: Answer

    def arrived(self, pieces: Mapping[int, Piece], now: float) -> None:
        """Tokens of the request came in."""
        generated = 0
        for piece in pieces.values():
            generated += len(piece.tokens)
            if piece.tokens and self.record.first_token is not None:
                self.metrics.inter_token_latency.observe(now - self.record.last_token)
            if piece.finish is not None:
                self.metrics.finished(piece.finish)
        if generated:
            self._count(generated, now)

    def _count(self, generated: int, now: float) -> None:
        record = self.record
        if record.first_token is None:
            self.metrics.time_to_first_token.observe(now - record.began)
            record.first_token = now
            record.queued = self.answer.queued
        record.last_token = now
        self.metrics.generation_tokens.inc(generated)
        self.metrics.generated.add(generated, now)
        record.generated_tokens += generated
        record.tenant.charge(generated, now)

    def left(self) -> None:
        """Nobody waits for the rest of the answer."""
        for _ in range(self.answer.going):
            self.metrics.finished(Finish.ABORT.value)

    def ended(self, now: float) -> None:
        """The request was answered in full."""
        usage = self.answer.usage
        self.record.queued = self.answer.queued
        self.metrics.phases(self.record.phases(now))
        self.metrics.e2e_latency.observe(now - self.record.began)
        self.metrics.request_prompt_tokens.observe(usage.prompt_tokens)
        self.metrics.request_generation_tokens.observe(usage.completion_tokens)
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
