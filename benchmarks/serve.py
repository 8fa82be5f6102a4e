"""Measure a server that speaks OpenAI's API: throughput and latency of streamed completions.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --concurrency 1,8,32,64

Each point (a seed, and a number of clients or a Poisson rate) runs a warm-up, then the measured
requests, and gives a line of the table; benchmarks/loadgen/metrics.py defines every figure.
Outputs have exactly the length asked for (ignore_eos) and temperature is 0, unless told otherwise.
The same seed asks the same questions: a server that was not restarted in between may answer them
from its prefix cache, and the column `cached` shows it. The exit status is 1 if any request failed.
"""

import argparse
import asyncio
import sys
import urllib.request
from collections.abc import Callable, Sequence
from math import inf, nan
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.loadgen.bench import Bench, Point
from benchmarks.loadgen.lengths import WORKLOADS, Recorded
from benchmarks.loadgen.load import Concurrency, Load, PoissonRate
from benchmarks.loadgen.prompts import Dataset, PromptSource, RandomPrompts
from benchmarks.loadgen.recording import Server
from benchmarks.loadgen.report import failures, table
from benchmarks.loadgen.workload import Workload

_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what `argv` asks for and give the status to exit with."""
    given = sys.argv[1:] if argv is None else argv
    parser = _parser()
    options = parser.parse_args(given)
    try:
        bench = _bench(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    loads: list[Load] = options.rate or options.concurrency
    points = asyncio.run(_measure(bench, loads, options.seeds))
    print(table(points))
    print(failures(points), end="")
    if options.json is not None:
        report = {"command": given, "model": bench.workload.model, "points": points}
        options.json.write_bytes(msgspec.json.encode(report))
    return int(any(point.failed for point in points))


async def _measure(bench: Bench, loads: Sequence[Load], seeds: Sequence[int]) -> list[Point]:
    return [await bench.measure(load, seed) for seed in seeds for load in loads]


def _bench(options: argparse.Namespace) -> Bench:
    """The benchmark that the options describe.

    Raises:
        OSError: a file cannot be read, or the server does not list its models.
        ValueError: the URL or a file is malformed.
    """
    workload = Workload(
        options.model or first_model(options.url),
        Recorded.read(options.lengths) if options.lengths else WORKLOADS[options.workload],
        options.longest,
        _prompts(options),
        options.temperature,
        options.ignore_eos,
    )
    server = Server.at(options.url)
    return Bench(server, workload, options.requests, options.warmup, options.timeout)


def _prompts(options: argparse.Namespace) -> PromptSource:
    if options.dataset_path is None:
        return RandomPrompts(options.prefix_tokens, options.token_ids)
    if options.prefix_tokens or options.token_ids:
        raise ValueError("--prefix-tokens and --token-ids are for random prompts: leave them out.")
    return Dataset.read(options.dataset_path)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def first_model(url: str) -> str:
    """The first of the models that the server at `url` lists.

    Raises:
        OSError: the server does not answer.
        ValueError: its answer lists no model.
    """
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as answer:
            listed = msgspec.json.decode(answer.read(), type=_Models)
    except OSError as error:
        raise OSError(f"{url} does not list its models: {error}. Is the server up?") from error
    if not listed.data:
        raise ValueError(f"{url} lists no model; name one with --model.")
    return listed.data[0].id


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_load(parser)
    _add_workload(parser)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every figure and every time there too"
    )
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server; default: %(default)s")
    add("--model", metavar="NAME", help="default: the first that the server lists")
    add(
        "--concurrency",
        metavar="N,...",
        type=_list_of(lambda text: Concurrency(_whole(1)(text))),
        default="1,8,32,64",
        help="clients that ask again when they were answered; default: %(default)s",
    )
    add(
        "--rate",
        metavar="R,...",
        type=_list_of(lambda text: PoissonRate(_above_zero(text))),
        help="instead: requests a second, at the random times of a Poisson process",
    )
    add("--requests", metavar="N", type=_whole(1), default=200, help="default: %(default)s a point")
    add("--warmup", metavar="N", type=_whole(0), default=8, help="requests; default: %(default)s")
    add(
        "--timeout",
        metavar="SECONDS",
        type=_above_zero,
        default=600,
        help="a request that takes longer has failed; default: %(default)s",
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add(
        "--workload",
        choices=sorted(WORKLOADS),
        default="chat",
        help="chat: 150 tokens in and 105 out on average; instr: 19 and 56; default: %(default)s",
    )
    add(
        "--lengths",
        metavar="FILE",
        type=Path,
        help="instead: lengths drawn from a CSV (.gz or plain) with a line of column names, whose "
        "last two columns are the tokens of prompt and output; with a column `conv`, only the "
        "first line of each conversation counts",
    )
    add(
        "--longest",
        metavar="TOKENS",
        type=_whole(1),
        default=512,
        help="prompts and outputs are clipped to it; default: %(default)s",
    )
    add(
        "--prefix-tokens",
        metavar="N",
        type=_whole(0),
        default=0,
        help="all prompts begin with the same N tokens, in addition to their length",
    )
    add(
        "--token-ids",
        metavar="VOCABULARY",
        type=_whole(1),
        help="prompts are random token ids below this, exact in length, instead of random words",
    )
    add(
        "--dataset-path",
        metavar="FILE",
        type=Path,
        help="instead: prompts of a JSONL, as long as they are, in random order; a line has a "
        "`prompt`, or `messages`, which are asked of /v1/chat/completions (see benchmarks.dataset)",
    )
    add(
        "--temperature",
        metavar="T",
        type=_from_zero,
        default=0.0,
        help="above 0 the Nth request has the seed N; default: %(default)s",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether answers have exactly the lengths drawn, or end there at the latest",
    )
    add(
        "--seeds",
        metavar="S,...",
        type=_list_of(_whole(0)),
        default="0",
        help="run every load once for each; default: %(default)s",
    )


def _list_of(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    return lambda text: [parse(each) for each in text.split(",")]


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
        return int(text)

    return parse


def _above_zero(text: str) -> float:
    number = _number(text)
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _from_zero(text: str) -> float:
    number = _number(text)
    if not 0 <= number < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


if __name__ == "__main__":
    sys.exit(main())
