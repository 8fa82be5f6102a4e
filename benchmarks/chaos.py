"""Load a cell while its processes are killed and stopped; count what clients lost, and must not.

    python -m benchmarks.chaos --minutes 3 --engine echo --kill-rate 12 --stop-rate 4

Every answer is compared token for token with what it has to be: with EchoEngine by its oracle, with
a real model by what it answered before the faults. Who loses its gateway goes on with
`Last-Event-ID`, as a client would. The exit status is 1 unless all streams were exact and nothing
leaked.
"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from benchmarks.drill.injuries import Injurer
from benchmarks.drill.questions import SAMPLED, Question, Questioner
from benchmarks.drill.served import Served, serving
from benchmarks.drill.streams import EXACT, LOST, REFUSED, Answer, ask
from benchmarks.drill.timeline import timeline
from benchmarks.drill.verdict import Verdict
from pagefleet.settings import DEFAULT_MODEL
from pagefleet_worker.prepare import ECHO_MODEL, default_cache, prepare

SERVICES = ("worker", "scheduler", "gateway")
TEXTS = 24
"""Different questions to a real model; each is asked many times."""

CUT_OFF = (LOST, REFUSED)
"""Verdicts on an answer whose gateway is gone; what had come of it was right."""

WORKER_WAIT = 120
"""Seconds that requests wait for a worker: real ones may all be dead, and start slowly."""

_REST_SECONDS = 60.0
_RETIREMENT_SECONDS = 40
_RETRY_SECONDS = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Run what `argv` asks for and give the status to exit with."""
    options = _parser().parse_args(argv)
    verdict = asyncio.run(Chaos(options).run())
    print(verdict.table())
    for answer in verdict.answers:
        if answer.verdict != EXACT:
            print(f"{answer.verdict}: {answer.question.form}, {answer.error}", file=sys.stderr)
    if options.timeline is not None:
        options.timeline.write_text(timeline(verdict))
    return int(verdict.failed)


class Chaos:
    """One run; `options` are those of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._echo = options.engine == "echo"
        self._model = _model(self._echo, default_cache())
        self._questioner = Questioner(self._model, options.seed)
        self._answers: list[Answer] = []
        self._resumed = self._reconnects = 0

    async def run(self) -> Verdict:
        """Load and injure a cell, then wait until it rests."""
        options = self._options
        async with serving(self._arguments()) as served:
            await served.idle(options.workers, _REST_SECONDS)
            questions = self._any if self._echo else await self._rehearsed(served)
            await served.idle(options.workers, _REST_SECONDS)
            await served.listen(options.gateways, _REST_SECONDS)
            before = served.descriptors()
            calm = monotonic()
            until = calm + options.calm + options.minutes * 60
            injurer = Injurer(
                served,
                options.targets.split(","),
                options.kill_rate,
                options.stop_rate,
                [float(seconds) for seconds in options.stops.split(",")],
                random.Random(options.seed),
            )
            async with asyncio.TaskGroup() as group:
                for _ in range(options.clients):
                    group.create_task(self._client(served, questions, until))
                await asyncio.sleep(options.calm)
                began = monotonic()
                await injurer.injure(until - began)
            ended = monotonic()
            idle = await served.idle(options.workers, _REST_SECONDS)
            return Verdict(
                calm,
                began,
                ended,
                self._answers,
                injurer.done,
                served.lines,
                self._resumed,
                self._reconnects,
                await served.blocks(),
                await _leaked(served, before),
                idle,
            )

    def _arguments(self) -> list[str]:
        options = self._options
        return [
            f"--model={self._model}",
            f"--engine={'echo' if self._echo else 'torch'}",
            f"--workers={options.workers}",
            f"--gateways={options.gateways}",
            f"--step-seconds={options.step_seconds}",
            f"--num-blocks={options.blocks}",
            f"--worker-wait={WORKER_WAIT}",
            "--check",
        ]

    def _any(self) -> Iterator[Question]:
        while True:
            yield self._questioner.any(self._options.prompt, self._options.tokens)

    async def _rehearsed(self, served: Served) -> Callable[[], Iterator[Question]]:
        """Questions to a real model, asked once while nothing goes wrong."""
        options, known = self._options, []
        for number in range(TEXTS):
            form = SAMPLED[number % len(SAMPLED)]
            question = self._questioner.ask(form, options.prompt, options.tokens)
            answer = await ask(served.server, question)
            tokens = [answer.choices[index] for index in range(question.choices)]
            known.append(replace(question, model=None, known=tokens))
        draw = random.Random(options.seed)

        def drawn() -> Iterator[Question]:
            while True:
                yield draw.choice(known)

        return drawn

    async def _client(
        self, served: Served, questions: Callable[[], Iterator[Question]], until: float
    ) -> None:
        for question in questions():
            if monotonic() >= until:
                return
            self._answers.append(await self._ask(served, question))

    async def _ask(self, served: Served, question: Question) -> Answer:
        """Ask, and go on at the next gateway for as long as one dies before the end."""
        answer = await ask(served.server, question)
        while "gateway" in self._options.targets and _lost_its_gateway(answer):
            await asyncio.sleep(_RETRY_SECONDS)
            self._resumed += bool(answer.last_id)
            self._reconnects += not answer.last_id
            answer = await ask(served.server, question, begun=answer)
        return answer


def _model(echo: bool, cache: Path) -> Path:
    """Prepared; the echo model with two LoRA adapters, which any folders will do for."""
    if not echo:
        return prepare(DEFAULT_MODEL, cache)
    cache.mkdir(parents=True, exist_ok=True)
    return prepare(ECHO_MODEL, cache, adapters={"one": str(cache), "two": str(cache)})


def _lost_its_gateway(answer: Answer) -> bool:
    cut = answer.error is not None and answer.error.startswith(("connection", "cut off"))
    return cut and answer.verdict in CUT_OFF


async def _leaked(served: Served, before: Counter[str]) -> Counter[str]:
    """Descriptors by service and kind beyond those before, once the replaced had time to end."""
    for _ in range(2 * _RETIREMENT_SECONDS):
        if not (leaked := served.descriptors() - before):
            break
        await asyncio.sleep(0.5)
    return leaked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=3.0, help="of faults; default: %(default)s")
    add("--calm", type=float, default=15.0, help="seconds before them; default: %(default)s")
    add("--engine", choices=("echo", "real"), default="echo", help="default: %(default)s")
    add("--workers", type=int, default=3, help="default: %(default)s")
    add("--gateways", type=int, default=2, help="default: %(default)s")
    add("--clients", type=int, default=12, help="streams at once; default: %(default)s")
    add("--prompt", type=int, default=100, help="tokens at most; default: %(default)s")
    add("--tokens", type=int, default=100, help="of an answer at most; default: %(default)s")
    add("--blocks", type=int, default=128, help="of each worker; default: %(default)s")
    add("--step-seconds", type=float, default=0.01, help="of EchoEngine; default: %(default)s")
    add("--kill-rate", type=float, default=12.0, help="a minute; default: %(default)s")
    add("--stop-rate", type=float, default=4.0, help="a minute; default: %(default)s")
    add("--stops", default="0.3,2,4", help="seconds to choose from; default: %(default)s")
    add("--targets", default=",".join(SERVICES), help="services; default: %(default)s")
    add("--seed", type=int, default=random.randrange(2**32), help="default: a random one")
    add("--timeline", type=Path, help="write a picture (SVG) there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
