"""What a step costs the scheduler: from the frame of a worker's result to the frames that follow.

One worker decodes a batch of sequences that all go on: the scheduler takes the result, gives every
sequence its token, plans the next step and encodes the plan and the news for the gateway. Nothing
waits for sockets; time is the processor's.

The figure to compare with is microseconds a sequence a step: of a GPU's step of some milliseconds,
a scheduler may take only a small part.
"""

import argparse
import time
from dataclasses import dataclass
from statistics import median

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    ROW_FIELDS,
    ChoiceState,
    GatewayHello,
    Join,
    Plan,
    Result,
    Submit,
    WorkerHello,
    decode_from_worker,
    encode,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Arrived, Scheduler
from pagefleet_scheduler.outbox import Send

WORKER, GATEWAY = b"worker", b"gateway"
PROMPT = 100
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Cost:
    """Medians of one step in which every sequence got a token."""

    handle: float
    """Seconds to decode the result and to decide."""
    encode: float
    """Seconds to encode what is sent."""
    plan_bytes: int


def measure(sequences: int, steps: int) -> Cost:
    """Decode `sequences` at once for some steps, without a pause."""
    scheduler = Scheduler(1 << 20)
    outputs = steps + 100
    blocks = sequences * ((PROMPT + outputs) // BLOCK_SIZE + 1)
    hello = WorkerHello(
        PROTOCOL, "host", 1, 1, "model", "class", BLOCK_SIZE, blocks, sequences, 8192, 8192, 50_000
    )
    params = SamplingParams(max_tokens=outputs, seed=1)
    submits = [
        Submit(f"request-{number:032}", 0, pack_ints([number] * PROMPT), params, [ChoiceState(0)])
        for number in range(sequences)
    ]
    sends = scheduler.handle([Arrived(WORKER, hello), Arrived(GATEWAY, GatewayHello(PROTOCOL))], 0)
    sends += scheduler.handle([Arrived(GATEWAY, submit) for submit in submits], 0)
    (epoch,) = (send.message.epoch for send in sends if isinstance(send.message, Join))
    plans = _plans(sends)
    handles: list[float] = []
    encodes: list[float] = []
    sizes: list[int] = []
    while len(handles) < steps:
        frame, samples = _answer(epoch, plans.pop(0))
        begin = time.process_time()
        result = decode_from_worker(frame)
        sends = scheduler.handle([Arrived(WORKER, result)], 0)
        decided = time.process_time()
        frames = [encode(send.message) for send in sends]
        end = time.process_time()
        plans += _plans(sends)
        if samples < sequences:
            continue
        handles.append(decided - begin)
        encodes.append(end - decided)
        sizes += [len(f) for f, send in zip(frames, sends, strict=True) if send.peer == WORKER]
    return Cost(median(handles), median(encodes), int(median(sizes)))


def _plans(sends: list[Send]) -> list[Plan]:
    return [send.message for send in sends if isinstance(send.message, Plan)]


def _answer(epoch: int, plan: Plan) -> tuple[bytes, int]:
    samples = sum(unpack_ints(plan.rows)[3::ROW_FIELDS])
    return encode(Result(epoch, plan.step, pack_ints([5] * samples))), samples


def main() -> None:
    """Print a line for each size of a batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default="1,8,32,64,256", help="sizes of the batch")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    print("| sequences | decide, us | encode, us | us a sequence | plan, bytes a sequence |")
    print("| --- | --- | --- | --- | --- |")
    for sequences in map(int, options.sequences.split(",")):
        cost = measure(sequences, options.steps)
        whole = 1e6 * (cost.handle + cost.encode) / sequences
        print(
            f"| {sequences} | {1e6 * cost.handle:.0f} | {1e6 * cost.encode:.0f} "
            f"| {whole:.2f} | {cost.plan_bytes / sequences:.0f} |"
        )


if __name__ == "__main__":
    main()
