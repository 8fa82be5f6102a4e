"""More requests than a cell can serve: do those that are let in fare as well, and the others know?

    python -m benchmarks.overload --times 1,2,5,20

An echo cell whose steps take as long as a GPU's is first kept busy by as many clients as it has
slots, which tells its capacity. Then requests come at random times at multiples of that, and are
never asked again. Every answer is compared, token for token, with what it has to be. After each
load a request is asked alone until it takes no longer than before: the cell has recovered.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from benchmarks.drill.questions import Question, Questioner
from benchmarks.drill.served import Served, serving
from benchmarks.drill.streams import EXACT, REFUSED, Answer, ask
from benchmarks.drill.verdict import quantile
from pagefleet_worker.prepare import ECHO_MODEL, default_cache, prepare

PROMPT, TOKENS = 40, 20
RECOVERED = 1.5
"""Times what a request takes alone in a cell that did nothing else."""

_PATIENCE = 60.0
_TIMES = ("exact p50, p99, s", "refused p50, p99, ms")


@dataclass
class Load:
    """What came of the requests of one load."""

    answers: list[tuple[Answer, float]] = field(default_factory=list)
    """Each with the seconds that it took."""
    seconds: float = 0.0
    """From the first request to the last answer."""

    def times(self, verdict: str) -> list[float]:
        """What the answers of this verdict took, in order."""
        return sorted(taken for answer, taken in self.answers if answer.verdict == verdict)

    @property
    def goodput(self) -> float:
        """Exact tokens a second."""
        return sum(a.tokens for a, _ in self.answers if a.verdict == EXACT) / self.seconds

    @property
    def other(self) -> list[str]:
        """What should not have happened."""
        return [
            f"{answer.verdict}: {answer.error}"
            for answer, _ in self.answers
            if answer.verdict not in (EXACT, REFUSED)
        ]


class Overload:
    """A cell and those who ask it."""

    def __init__(self, served: Served, questioner: Questioner) -> None:
        self._served = served
        self._questioner = questioner

    async def closed(self, clients: int, seconds: float) -> Load:
        """So many clients, each of which asks again when it has its answer."""
        load, begin = Load(), monotonic()

        async def client() -> None:
            while monotonic() < begin + seconds:
                await self._ask(load)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        load.seconds = monotonic() - begin
        return load

    async def open(self, rate: float, seconds: float, rng: random.Random) -> Load:
        """Requests at random times, `rate` a second on average."""
        load, begin = Load(), monotonic()
        due = begin
        async with asyncio.TaskGroup() as group:
            while (due := due + rng.expovariate(rate)) < begin + seconds:
                await asyncio.sleep(due - monotonic())
                group.create_task(self._ask(load))
        load.seconds = monotonic() - begin
        return load

    async def alone(self) -> float:
        """Seconds that a request takes when there is no other."""
        load = Load()
        await self._ask(load)
        return load.answers[0][1]

    async def recovery(self, usual: float) -> float:
        """Seconds until a request takes about as long as usual."""
        begin = monotonic()
        while monotonic() - begin < _PATIENCE:
            asked = monotonic()
            if await self.alone() <= RECOVERED * usual:
                return asked - begin
        return _PATIENCE

    async def _ask(self, load: Load) -> None:
        question: Question = self._questioner.ask("greedy", PROMPT, TOKENS)
        asked = monotonic()
        answer = await ask(self._served.server, question)
        load.answers.append((answer, monotonic() - asked))


async def run(options: argparse.Namespace) -> None:
    """Load a cell, and print a line for each load."""
    questioner = Questioner(prepare(ECHO_MODEL, default_cache()), options.seed)
    rng = random.Random(options.seed)
    arguments = [
        f"--model={ECHO_MODEL}",
        "--engine=echo",
        f"--step-seconds={options.step_seconds}",
        f"--max-num-seqs={options.slots}",
        f"--max-num-queued-reqs={options.queue}",
    ]
    heads = ["load", "asked, 1/s", "exact", "refused", "tokens/s", *_TIMES, "recovery, s"]
    print(f"| {' | '.join(heads)} |")
    print("| --- " * len(heads) + "|")
    async with serving(arguments) as served:
        await served.idle(1, _PATIENCE)
        overload = Overload(served, questioner)
        usual = sorted([await overload.alone() for _ in range(5)])[2]
        busy = await overload.closed(options.slots, options.seconds)
        capacity = len(busy.answers) / busy.seconds
        _print(f"{options.slots} clients", busy, await overload.recovery(usual))
        for times in map(float, options.times.split(",")):
            load = await overload.open(times * capacity, options.seconds, rng)
            _print(f"{times:g} times", load, await overload.recovery(usual))


def _print(name: str, load: Load, recovery: float) -> None:
    exact, refused = load.times(EXACT), load.times(REFUSED)
    print(
        f"| {name} | {len(load.answers) / load.seconds:.1f} | {len(exact)} | {len(refused)} "
        f"| {load.goodput:.0f} | {_percentiles(exact, 1)} | {_percentiles(refused, 1000)} "
        f"| {recovery:.2f} |",
        flush=True,
    )
    for line in load.other:
        print(line)


def _percentiles(times: Sequence[float], unit: float) -> str:
    if not times:
        return ""
    return ", ".join(f"{unit * quantile(times, share):.3g}" for share in (0.5, 0.99))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--times", default="1,2,5,20", help="the capacity; default: %(default)s")
    add("--seconds", type=float, default=15.0, help="of each load; default: %(default)s")
    add("--slots", type=int, default=16, help="sequences at once; default: %(default)s")
    add("--queue", type=int, default=16, help="requests that wait; default: %(default)s")
    add("--step-seconds", type=float, default=0.04, help="default: %(default)s")
    add("--seed", type=int, default=random.randrange(2**32), help="default: a random one")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
