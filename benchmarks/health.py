"""Does /health tell the truth? Never 503 under full load, quick then too, and soon after a loss.

    python -m benchmarks.health --minutes 3 --engine real

Twice as many clients as the cell has slots ask without a pause, while /health, /ready and /live are
asked ten times a second, each time over a new connection. Then the only worker is stopped as a
whole (SIGSTOP) under the load, and goes on when /health has said so. The exit status is 1 if
anything was said falsely, or not within two seconds of the loss.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from time import monotonic

from benchmarks.drill.questions import Questioner
from benchmarks.drill.served import Served, serving
from benchmarks.drill.streams import ask
from benchmarks.drill.verdict import quantile
from pagefleet.settings import DEFAULT_MODEL
from pagefleet_worker.prepare import ECHO_MODEL, default_cache, prepare

PATHS = ("/health", "/ready", "/live")
PROMPT, TOKENS = 40, 60
SLOTS = 32
KEPT_WORD = 2.0
"""Seconds after a loss within which /health says so."""

_PAUSE = 0.1
_PATIENCE = 60.0


class Prober:
    """Asks a URL again and again, in a process of its own (`drill.probe`)."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[float, int, float]] = []
        """When it was asked, the status (0: no answer), and the seconds until it came."""
        command = [sys.executable, "-m", "benchmarks.drill.probe", url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        with self._process:
            self._process.kill()
            self._thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            asked, status, taken = line.split()
            self.answers.append((float(asked), int(status), float(taken)))

    def said_falsely(self, until: float) -> int:
        """Answers but 200 to what was asked before a moment."""
        return sum(status != 200 for asked, status, _ in self.answers if asked < until)

    def row(self, until: float) -> str:
        """Of a Markdown table: what it said before a moment, and how quickly."""
        seconds = [taken for asked, _, taken in self.answers if asked < until]
        shown = [f"{1000 * quantile(seconds, share):.1f}" for share in (0.5, 0.99, 1.0)]
        return f"| {len(seconds)} | {self.said_falsely(until)} | {' | '.join(shown)} |"


class Load:
    """Clients that ask without a pause."""

    def __init__(self, served: Served, questioner: Questioner) -> None:
        self._served, self._questioner = served, questioner
        self.tokens = 0
        self.errors: list[str] = []

    async def client(self) -> None:
        """One of them, until it is cancelled."""
        while True:
            question = self._questioner.ask("greedy", PROMPT, TOKENS)
            answer = await ask(self._served.server, question)
            self.tokens += answer.tokens
            if answer.error is not None:
                self.errors.append(answer.error)


async def run(options: argparse.Namespace) -> bool:
    """Load a cell, then stop its worker; whether all that was said was true and in time."""
    echo = options.engine == "echo"
    model = ECHO_MODEL if echo else DEFAULT_MODEL
    arguments = [
        f"--model={model}",
        f"--engine={'echo' if echo else 'torch'}",
        f"--step-seconds={options.step_seconds}",
        f"--max-num-seqs={SLOTS}",
        "--hang-timeout=0",
    ]
    questioner = Questioner(prepare(ECHO_MODEL, default_cache()), options.seed)
    async with serving(arguments) as served:
        await served.idle(1, _PATIENCE)
        load = Load(served, questioner)
        clients = [asyncio.create_task(load.client()) for _ in range(options.clients)]
        probers = {path: Prober(f"{served.url.result()}{path}") for path in PATHS}
        began = monotonic()
        await asyncio.sleep(options.minutes * 60)
        tokens, lost = load.tokens, monotonic()
        worker = next(pid for pid, name in served.services.items() if name == "worker")
        os.kill(worker, signal.SIGSTOP)
        said = await _turned(probers["/health"], 503, lost)
        os.kill(worker, signal.SIGCONT)
        back = await _turned(probers["/health"], 200, lost + said)
        for task in clients:
            task.cancel()
        for prober in probers.values():
            prober.stop()
    print("| path | asked | not 200 | p50 ms | p99 ms | longest ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for path, prober in probers.items():
        print(f"| {path} {prober.row(lost)}")
    print(f"\n{(lost - began) / 60:.1f} minutes, {tokens / (lost - began):.0f} tokens/s, "
          f"{len(load.errors)} errors; 503 {said:.2f} s after the worker was stopped, "
          f"200 {back:.2f} s after it went on")  # fmt: skip
    true = not any(prober.said_falsely(lost) for prober in probers.values())
    return true and said <= KEPT_WORD and not load.errors


async def _turned(prober: Prober, status: int, since: float) -> float:
    """Seconds until a question that was asked then got such an answer; infinite after a minute."""
    while monotonic() - since < _PATIENCE:
        for asked, got, taken in prober.answers:
            if asked >= since and got == status:
                return asked + taken - since
        await asyncio.sleep(_PAUSE / 2)
    return float("inf")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what `argv` asks for and give the status to exit with."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.health",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=3.0, help="of full load; default: %(default)s")
    add("--engine", choices=("echo", "real"), default="echo", help="default: %(default)s")
    add("--clients", type=int, default=2 * SLOTS, help="default: %(default)s")
    add("--step-seconds", type=float, default=0.0, help="of EchoEngine; default: %(default)s")
    add("--seed", type=int, default=random.randrange(2**32), help="default: a random one")
    return int(not asyncio.run(run(parser.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
