"""Metrics of the cell behind a gateway, as the scheduler's last pulse tells them.

They are made anew at each scrape, and absent while no scheduler answers. `engine` is the number of
a worker; what no single worker has (waiting requests) is under `all`.
"""

from collections.abc import Iterator
from itertools import accumulate
from math import inf
from operator import attrgetter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagefleet.wire import STEP_BOUNDS, CellStats, EngineStats
from pagefleet_gateway.cell.client import SchedulerClient

_LABELS = ("model_name", "engine")


class LinkCollector(Collector):
    """What a gateway's link to the scheduler has seen that should be rare."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        """All families, as of now."""
        counters = self._client.link.counters
        for name, help, value in (
            (
                "resubmissions",
                "Requests handed over to the scheduler again.",
                counters.resubmissions,
            ),
            ("repeats", "Outputs that repeated what was here.", counters.repeats),
            ("gaps", "Outputs beyond what was here.", counters.gaps),
            ("conflicts", "Repeats unequal to what was here.", counters.conflicts),
            ("void", "Messages of an older epoch or attempt.", counters.void),
        ):
            yield CounterMetricFamily(f"pagefleet_gateway_link_{name}", help, value)


class CellCollector(Collector):
    """Collects from the link to the scheduler; `model` is the label of that name."""

    def __init__(self, client: SchedulerClient, model: str) -> None:
        self._client = client
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All families, as of now."""
        health = self._client.health
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting", "Requests that wait.", labels=_LABELS
        )
        waiting.add_metric((self._model, "all"), health.waiting)
        yield waiting
        stalled = GaugeMetricFamily(
            "pagefleet_stalled", "1 while requests wait and nothing runs, for 2 s and more."
        )
        stalled.add_metric((), health.stalled)
        yield stalled
        pulse = self._client.link.pulse
        if health.scheduler and pulse is not None:
            yield from self._of_engines(pulse.engines)
            yield from self._counts_of_engines(pulse.engines)
            if pulse.cell is not None:
                yield from self._of_cell(pulse.cell)

    def _of_cell(self, cell: CellStats) -> Iterator[Metric]:
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of a step.", labels=_LABELS
        )
        bounds = map(floatToGoString, (*STEP_BOUNDS, inf))
        buckets = list(zip(bounds, accumulate(cell.steps), strict=True))
        steps.add_metric((self._model, "all"), buckets, cell.step_tokens)
        yield steps
        for name, help, value in (
            ("stale_results", "Results of lost workers, dropped.", cell.dropped_results),
            ("lost_workers", "Workers that died, hung or left.", cell.lost_workers),
            ("migrations", "Sequences that lost their worker.", cell.migrations),
            ("quarantines", "Requests refused because they end workers.", cell.quarantined),
            ("suspects", "Sequences that ran alone after a worker's end.", cell.suspects),
            ("class_changes", "Streams that went on in other numerics.", cell.class_changes),
            ("streams_moved", "Open streams that changed their gateway.", cell.moved),
            ("streams_recalled", "Streams that went on from kept tokens.", cell.recalled),
            ("worker_epochs", "Epochs that workers were given.", cell.joins),
        ):
            yield CounterMetricFamily(f"pagefleet_{name}", help, value)
        yield SummaryMetricFamily(
            "pagefleet_recovery_seconds",
            "From the loss of a sequence's worker to its next token.",
            cell.recoveries,
            cell.recovery_micros / 1e6,
        )

    def _of_engines(self, engines: list[EngineStats]) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "vllm:num_requests_running", "Sequences that run.", labels=_LABELS
        )
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "Share of the KV pool that is in use, 0 to 1.",
            labels=_LABELS,
        )
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Size of the KV pool.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks"),
        )
        blocks = GaugeMetricFamily(
            "pagefleet_blocks", "Blocks of the KV pool by state.", labels=(*_LABELS, "state")
        )
        for stats in engines:
            labels = (self._model, str(stats.engine))
            running.add_metric(labels, stats.running)
            usage.add_metric(labels, stats.used_blocks / max(stats.blocks, 1))
            config.add_metric((*labels, str(stats.block_size), str(stats.blocks)), 1)
            free = stats.blocks - stats.used_blocks - stats.cached_blocks
            blocks.add_metric((*labels, "used"), stats.used_blocks)
            blocks.add_metric((*labels, "cached"), stats.cached_blocks)
            blocks.add_metric((*labels, "free"), free)
        yield from (running, usage, config, blocks)

    def _counts_of_engines(self, engines: list[EngineStats]) -> Iterator[Metric]:
        for name, help, count in (
            ("prefix_cache_queries", "Prompt tokens looked up.", attrgetter("prefix_queries")),
            ("prefix_cache_hits", "Of these, tokens found.", attrgetter("prefix_hits")),
            ("num_preemptions", "Sequences that lost their blocks.", attrgetter("preemptions")),
            ("spec_decode_num_draft_tokens", "Tokens fed on trial.", attrgetter("drafted")),
            ("spec_decode_num_accepted_tokens", "Of these, kept.", attrgetter("drafts_kept")),
        ):
            family = CounterMetricFamily(f"vllm:{name}", help, labels=_LABELS)
            for stats in engines:
                family.add_metric((self._model, str(stats.engine)), count(stats))
            yield family
