import random
from math import isnan
from statistics import quantiles

import pytest

from benchmarks.loadgen.answer import Completed, Failed
from benchmarks.loadgen.metrics import count_failures, percentile, summarize


def test_percentiles_are_those_of_the_standard_library():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for count in (2, 3, 10, 101, 1000):
        values = sorted(rng.expovariate(1) for _ in range(count))
        expected = quantiles(values, n=100, method="inclusive")
        for percent in (1, 50, 90, 99):
            assert percentile(values, percent) == pytest.approx(expected[percent - 1])
    assert percentile([7.0], 99) == 7.0
    assert isnan(percentile([], 50))


def test_a_summary_adds_up_what_was_measured_by_hand():
    outcomes = [
        Completed(10.0, [10.5, 10.6, 10.8], 11.0, 100, 25, 4),
        Completed(11.0, [11.1, 11.4], 12.0, 300, 0, 2),
        Failed(11.5, 14.0, "timeout", "too late"),
    ]
    summary = summarize(outcomes)
    assert (summary.completed, summary.failed) == (2, 1)
    assert summary.duration == 4
    assert summary.requests_per_second == 2 / 4
    assert summary.output_tokens_per_second == 6 / 4
    assert summary.ttft_p50 == pytest.approx(0.3)
    assert summary.ttft_p99 == pytest.approx(0.1 + 0.99 * 0.4)
    assert summary.itl_p50 == pytest.approx(0.2)
    assert summary.itl_p99 == pytest.approx(0.2 + 0.98 * 0.1)
    assert summary.normalized_latency == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert (summary.mean_prompt_tokens, summary.mean_output_tokens) == (200, 3)
    assert summary.cached_share == 25 / 400
    assert summary.tokens_per_chunk == 6 / 5


def test_without_answers_nothing_is_claimed():
    summary = summarize([Failed(0.0, 1.0, "connection", "refused")])
    assert summary.requests_per_second == summary.output_tokens_per_second == 0
    assert isnan(summary.ttft_p50)
    assert isnan(summary.itl_p99)
    assert isnan(summary.normalized_latency)


def test_failures_are_counted_by_kind_with_the_first_message():
    outcomes = [
        Failed(0.0, 1.0, "timeout", "a"),
        Failed(0.0, 1.0, "HTTP 503", "b"),
        Completed(0.0, [1.0], 1.0, 1, 0, 1),
        Failed(0.0, 1.0, "HTTP 503", "c"),
    ]
    assert count_failures(outcomes) == [("HTTP 503", 2, "b"), ("timeout", 1, "a")]
