"""What a step costs the scheduler: from the frame of a worker's result to the frames that follow.

One worker decodes a batch of sequences: the scheduler takes the result, gives every sequence its
token, plans the next step and encodes the plan and the news for the gateway. Nothing waits for
sockets; time is the processor's. The cases add what a step may meet besides.

The figure to compare with is microseconds a sequence a step: of a GPU's step of some milliseconds,
a scheduler may take only a small part.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    ROW_FIELDS,
    ChoiceState,
    Credit,
    GatewayHello,
    Join,
    Logprobs,
    Outputs,
    Plan,
    Result,
    Submit,
    WorkerHello,
    decode_from_worker,
    encode,
    pack_floats,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Arrived, Event, Lost, Scheduler
from pagefleet_scheduler.outbox import Send

WORKER, GATEWAY = b"worker", b"gateway"
PROMPT = 100
_LIVES = Arrived(GATEWAY, Credit("", 0, {}))
BLOCK_SIZE = 16
VOCABULARY = 1000
WARM_UP = 100
"""Steps before those that count."""


@dataclass(frozen=True)
class Case:
    """What a step meets."""

    text: str
    logprobs: int | None = None
    drafts: int | None = 0
    """See `Scheduler`; text that is drawn at random holds few that are right."""
    outputs: int = 0
    """After so many on the average a sequence ends, and another comes; 0: all go on."""
    waiting: int = 0
    """Requests for which there is no slot."""


CASES = {
    "decode": Case("all decode"),
    "logprobs": Case("with two logprobs a token", logprobs=2),
    "drafts": Case("drafts are looked for, mostly in vain", drafts=None),
    "arrivals": Case("each ends after about 128 tokens, and another comes", outputs=128),
    "queue": Case("10,000 more wait for a slot", waiting=10_000),
}


@dataclass(frozen=True)
class Cost:
    """Medians of one step."""

    handle: float
    """Seconds to decode the result and to decide."""
    encode: float
    """Seconds to encode what is sent."""
    plan_bytes: int


class Load:
    """A worker and a gateway that keep a scheduler busy."""

    def __init__(self, sequences: int, steps: int, case: Case) -> None:
        self.case = case
        self.now = 0.0
        self._random = random.Random(0)
        self._most = 2 * case.outputs or steps + WARM_UP
        self._count = 0
        self._scheduler = Scheduler(1 << 20, drafts=case.drafts)
        self._plans: list[Plan] = []
        blocks = sequences * ((PROMPT + self._most) // BLOCK_SIZE + 1)
        sizes = BLOCK_SIZE, blocks, sequences, 1 << 17, 1 << 17, VOCABULARY
        worker = WorkerHello(PROTOCOL, "host", 1, 1, "model", "class", *sizes, exact=True)
        arrived = [Arrived(WORKER, worker), Arrived(GATEWAY, GatewayHello(PROTOCOL))]
        sends = self._scheduler.handle(arrived, self.now)
        (self._epoch,) = (send.message.epoch for send in sends if isinstance(send.message, Join))
        self._news: list[Event] = [_LIVES]
        submits = [self._submit() for _ in range(sequences + case.waiting)]
        self._take(self._scheduler.handle(submits, self.now))

    def step(self) -> Cost:
        """Answer a plan, and see what that costs."""
        plan = self._plans.pop(0)
        frame = encode(self._result(plan))
        end = self.now + 0.01 + 1e-6 * len(plan.tokens)
        early = Cost(0.0, 0.0, 0)
        if (due := self._scheduler.due) < end:
            early = self._handle([], due)
        self.now = end
        begin = time.process_time()
        result = decode_from_worker(frame)
        decoded = time.process_time() - begin
        news, self._news = self._news, [_LIVES]
        late = self._handle([*news, Arrived(WORKER, result)], end)
        return Cost(
            early.handle + decoded + late.handle,
            early.encode + late.encode,
            early.plan_bytes + late.plan_bytes,
        )

    def _handle(self, events: list[Event], now: float) -> Cost:
        begin = time.process_time()
        sends = self._scheduler.handle(events, now)
        decided = time.process_time()
        frames = [encode(send.message) for send in sends]
        end = time.process_time()
        plans = [len(f) for f, send in zip(frames, sends, strict=True) if send.peer == WORKER]
        self._take(sends)
        return Cost(decided - begin, end - decided, sum(plans))

    def _take(self, sends: list[Send]) -> None:
        """For each sequence that ends, another comes."""
        self._plans += [send.message for send in sends if isinstance(send.message, Plan)]
        outputs = [send.message for send in sends if isinstance(send.message, Outputs)]
        ended = sum(item.finish is not None for message in outputs for item in message.items)
        self._news += [self._submit() for _ in range(ended)]

    def _submit(self) -> Arrived:
        self._count += 1
        outputs = self._random.randint(1, self._most) if self.case.outputs else self._most
        params = SamplingParams(max_tokens=outputs, seed=1, logprobs=self.case.logprobs)
        prompt = pack_ints(self._tokens(PROMPT))
        id, choices = f"request-{self._count:032}", [ChoiceState(0)]
        return Arrived(GATEWAY, Submit(id, 0, prompt, params, choices, window=self._most))

    def _result(self, plan: Plan) -> Result:
        samples = sum(unpack_ints(plan.rows)[3::ROW_FIELDS])
        tokens = pack_ints(self._tokens(samples))
        logprobs = []
        if count := self.case.logprobs:
            numbers = pack_floats([-1.0] * count)
            one = Logprobs(numbers[:4], pack_ints(range(count)), numbers)
            logprobs = [(sample, one) for sample in range(samples)]
        return Result(self._epoch, plan.step, tokens, logprobs)

    def _tokens(self, count: int) -> Iterator[int]:
        return (self._random.randrange(VOCABULARY) for _ in range(count))


def measure(sequences: int, steps: int, case: Case) -> Cost:
    """Decode `sequences` at once for some steps, without a pause."""
    load = Load(sequences, steps, case)
    for _ in range(WARM_UP):
        load.step()
    costs = [load.step() for _ in range(steps - WARM_UP)]
    return Cost(
        median(cost.handle for cost in costs),
        median(cost.encode for cost in costs),
        int(median(cost.plan_bytes for cost in costs)),
    )


def membership(workers: int, waiting: int, alike: bool) -> tuple[float, float]:
    """Seconds that a worker's join and its loss take beside others, while requests of all lengths
    wait; medians. If workers are not `alike`, each has a block more than the last.
    """
    draw, scheduler = random.Random(0), Scheduler(1 << 20)

    def hello(number: int) -> Arrived:
        blocks = 1000 if alike else 1000 + number
        sizes = BLOCK_SIZE, blocks, 1, 4096, 4096, VOCABULARY
        peer = f"worker{number}".encode()
        return Arrived(peer, WorkerHello(PROTOCOL, "host", number, 1, "model", "class", *sizes))

    def submit(number: int) -> Arrived:
        params = SamplingParams(max_tokens=draw.randint(1, 1000), seed=1)
        prompt = pack_ints(range(draw.randint(1, 1000)))
        return Arrived(GATEWAY, Submit(f"{number:032}", 0, prompt, params, [ChoiceState(0)]))

    def took(event: Event) -> float:
        begin = time.process_time()
        scheduler.handle([event], 0.0)
        return time.process_time() - begin

    scheduler.handle([Arrived(GATEWAY, GatewayHello(PROTOCOL)), *map(hello, range(workers))], 0.0)
    scheduler.handle(map(submit, range(workers + waiting)), 0.0)
    last = hello(workers)
    times = [(took(last), took(Lost(last.peer))) for _ in range(20)]
    joins, losses = zip(*times, strict=True)
    return median(joins), median(losses)


def main() -> None:
    """Print a line for each size of a batch, or what it costs that workers come and go."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, help="measure a join and a loss beside so many")
    parser.add_argument("--sequences", default="1,8,32,64,256,1000", help="sizes of the batch")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--case", choices=CASES, default="decode")
    options = parser.parse_args()
    if options.workers is not None:
        for alike in (True, False):
            join, loss = membership(options.workers, 10_000, alike)
            print(f"{alike=}: a join takes {1e3 * join:.2f} ms, a loss {1e3 * loss:.2f} ms")
        return
    print(CASES[options.case].text)
    print("| sequences | decide, us | encode, us | us a sequence | plan, bytes a sequence |")
    print("| --- | --- | --- | --- | --- |")
    for sequences in map(int, options.sequences.split(",")):
        cost = measure(sequences, options.steps, CASES[options.case])
        whole = 1e6 * (cost.handle + cost.encode) / sequences
        print(
            f"| {sequences} | {1e6 * cost.handle:.0f} | {1e6 * cost.encode:.0f} "
            f"| {whole:.2f} | {cost.plan_bytes / sequences:.0f} |"
        )


if __name__ == "__main__":
    main()
