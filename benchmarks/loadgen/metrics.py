"""What the outcomes of one point of a benchmark add up to.

Only whole answers count; failed requests are counted apart and lend nothing to any figure.

requests/s, output tokens/s
    Whole answers, and the output tokens that their `usage` states, divided by the seconds from the
    first request's due time to the end of the last outcome. Chunks are never counted as tokens.
TTFT
    Time to first token: from the moment a request was due (connecting included) until the first
    chunk with a choice.
ITL
    Inter-token latency: the gap between one chunk of an answer and the next, of all answers
    together. If a server puts several tokens in a chunk this is the latency between deliveries;
    `tokens per chunk` tells.
normalized latency
    The mean over answers of the seconds from due to `[DONE]` divided by output tokens: the metric
    of the PagedAttention paper (Kwon et al., SOSP 2023, section 6.1).
tokens per chunk
    Output tokens divided by chunks.
cached share
    Prompt tokens that the server says it had in its prefix cache, of all prompt tokens.

Percentiles interpolate linearly between the two nearest ranks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from statistics import fmean

from benchmarks.loadgen.answer import Completed, Failed, Outcome


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one point, in seconds and tokens; NaN where no answer tells."""

    completed: int
    failed: int
    duration: float
    requests_per_second: float
    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    normalized_latency: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    cached_share: float
    tokens_per_chunk: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The `percent`th percentile of values in ascending order, NaN if there are none."""
    if not ordered:
        return nan
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """The figures of a point's outcomes, at least one."""
    answers = [outcome for outcome in outcomes if isinstance(outcome, Completed)]
    duration = max(each.done for each in outcomes) - min(each.due for each in outcomes)
    ttft = sorted(answer.chunks[0] - answer.due for answer in answers)
    itl = sorted(later - earlier for a in answers for earlier, later in pairwise(a.chunks))
    output_tokens = sum(answer.output_tokens for answer in answers)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return Summary(
        completed=len(answers),
        failed=len(outcomes) - len(answers),
        duration=duration,
        requests_per_second=len(answers) / duration,
        output_tokens_per_second=output_tokens / duration,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        itl_p50=percentile(itl, 50),
        itl_p99=percentile(itl, 99),
        normalized_latency=_mean((a.done - a.due) / a.output_tokens for a in answers),
        mean_prompt_tokens=_mean(answer.prompt_tokens for answer in answers),
        mean_output_tokens=_mean(answer.output_tokens for answer in answers),
        cached_share=_ratio(sum(answer.cached_tokens for answer in answers), prompt_tokens),
        tokens_per_chunk=_ratio(output_tokens, sum(len(answer.chunks) for answer in answers)),
    )


def count_failures(outcomes: Iterable[Outcome]) -> list[tuple[str, int, str]]:
    """Kind, number and one message of the failures, the most frequent kind first."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    messages = {failure.kind: failure.message for failure in reversed(failures)}
    kinds = Counter(failure.kind for failure in failures)
    return [(kind, count, messages[kind]) for kind, count in kinds.most_common()]


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else nan
