"""What a seed stands for: a small cell, some requests, and some faults among them."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from msgspec import structs

from pagefleet_scheduler import quarantine
from tests.simulation.cell import Scenario, Wish
from tests.simulation.clients import FORMS, make_submit
from tests.simulation.faults import (
    Fail,
    Fault,
    Interrupt,
    Kill,
    Leave,
    Mangle,
    Reconnect,
    Stick,
    Stop,
    Terminate,
)
from tests.simulation.network import SCHEDULER, Latency, Mangling, Manner, Moment, Severity

TROUBLE = 2.0
"""Virtual seconds within which faults begin."""

KINDS = [
    "GatewayHello", "Submit", "Abort", "Credit", "GatewayBeat", "Welcome", "Pulse", "Outputs",
    "WorkerHello", "Result", "WorkerBeat", "WorkerBye", "Join", "Fence", "Plan", "Moved",
    "GatewayBye", "Rejected",
]  # fmt: skip
"""All messages of a cell."""

UNSHARED_SEARCH = 24
"""Blocks that hold two beams of `LONGEST` tokens; where nothing is cached, beams that are computed
again share none of them."""

WORKER_ENDING = (Kill, Terminate, Stop, Stick, Fail, Interrupt)
"""Faults for which the scheduler may give a worker up. If one makes a request a suspect, and more
strike while it runs alone, it is refused by the rules of the quarantine."""


def random_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    draw = random.Random(f"scenario {seed}")
    workers, gateways = draw.randint(1, 3), draw.randint(1, 2)
    wishes = [
        Wish(
            draw.uniform(0.0, draw.choice([0.1, TROUBLE])),
            draw.randrange(gateways),
            make_submit(f"r{number}", draw.choice(list(FORMS)), draw),
            pace=draw.choice([0.0, 0.0, 0.01, 0.3]),
            resumes=draw.choice([None, 0.05, 1.0, 4.0]),
        )
        for number in range(draw.randint(2, 7))
    ]
    peers = [f"worker{n}" for n in range(workers)] + [f"gateway{n}" for n in range(gateways)]
    faults = [
        random_fault(draw, peers, len(wishes)) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4]))
    ]
    if draw.random() < 0.4:
        faults += bad_weather(draw)
    if sum(isinstance(fault, WORKER_ENDING) for fault in faults) > quarantine.LIMIT:
        wishes = [replace(wish, refusals=frozenset({"quarantined"})) for wish in wishes]
    most = draw.choice([0.001, 0.001, 0.01, 0.1])
    scenario = Scenario(
        seed=seed,
        wishes=wishes,
        faults=faults,
        workers=workers,
        gateways=gateways,
        blocks=draw.choice([18, 24, 40]),
        slots=draw.randint(2, 6),
        budget=draw.choice([3, 8, 32]),
        lookahead=draw.random() < 0.8,
        caching=draw.random() < 0.8,
        drafts=draw.choice([0, 1, 3]),
        host_blocks=draw.choice([0, 0, 12]),
        classes=draw.choice([("echo",), ("echo",), ("one", "two")]),
        step_seconds=(0.002, draw.choice([0.01, 0.05])),
        latency=Latency(most / 10, most),
    )
    scenario = replace(
        scenario,
        wishes=[with_deadline(wish, draw.choice([*[None] * 5, 0.3, 1.5])) for wish in wishes],
    )
    if not scenario.caching:
        scenario = replace(scenario, blocks=max(scenario.blocks, UNSHARED_SEARCH))
    if workers > 1 and draw.random() < 0.3:
        scenario = with_a_small_worker(scenario)
    scenario = replace(scenario, block_sizes=draw.choice([(4,), (4,), (4, 8)]))
    if scenario.lacking and draw.random() < 0.5:
        scenario = where_large_workers_restart(scenario, draw)
    return scenario


def with_a_small_worker(scenario: Scenario) -> Scenario:
    """Some requests do not fit the last worker, and are refused where no other is known to be."""
    wishes = [replace(wish, refusals=wish.refusals | {"too_long"}) for wish in scenario.wishes]
    return replace(scenario, lacking=scenario.blocks - 10, wishes=wishes)


def where_large_workers_restart(scenario: Scenario, draw: random.Random) -> Scenario:
    """Many requests do not fit the last worker, but the scheduler knows of the others, for which
    they wait: nobody is refused.
    """
    faults = [
        draw.choice([Kill, Terminate])(
            draw.uniform(0.1, TROUBLE), f"worker{number}", draw.uniform(0.05, 3.0)
        )
        for number in range(scenario.workers - 1)
    ]
    wishes = [replace(wish, refusals=frozenset[str]()) for wish in scenario.wishes]
    return replace(scenario, lacking=scenario.blocks - 4, faults=faults, wishes=wishes)


def with_deadline(wish: Wish, seconds: float | None) -> Wish:
    """A wish that has so much time."""
    return replace(wish, submit=structs.replace(wish.submit, left=seconds))


def bad_weather(draw: random.Random) -> list[Fault]:
    """All messages may be dropped, repeated and overtaken by others for a while."""
    seconds = draw.choice([0.05, 0.6, 2.0])
    return [
        Mangle(0.0, Mangling(how, None, draw.uniform(0.0, 0.2), 10_000, seconds=seconds), TROUBLE)
        for how in ("drop", "repeat", "delay")
    ]


def random_fault(draw: random.Random, peers: list[str], requests: int) -> Fault:
    """Some fault at some moment."""
    when = draw.uniform(0.0, TROUBLE)
    moment = Moment(draw.choice(KINDS), draw.randint(1, 30), draw.choice(["sent", "arrived"]))
    when_or_moment = draw.choice([when, moment])
    peer = draw.choice(peers)
    worker = draw.choice([peer for peer in peers if peer.startswith("worker")])
    anyone = draw.choice([SCHEDULER, worker, peer])
    mode = draw.choice(get_args(Severity))
    both = draw.choice([(True, True), (True, False), (False, True)])
    choices: list[Callable[[], Fault]] = [
        lambda: Kill(when_or_moment, anyone, draw.uniform(0.05, 3.0), draw.random() < 0.5),
        lambda: Terminate(when_or_moment, anyone, draw.uniform(0.05, 1.0)),
        lambda: Stop(when_or_moment, anyone, draw.choice([0.3, 0.8, 2.0, 3.0])),
        lambda: Stick(when_or_moment, worker, draw.choice([0.5, 1.5, 3.0])),
        lambda: Fail(when_or_moment, worker),
        lambda: Interrupt(when_or_moment, peer, draw.uniform(0.1, 3.0), *both, mode),
        lambda: Mangle(when_or_moment, random_mangling(draw), draw.uniform(0.2, TROUBLE)),
        lambda: Reconnect(when, f"r{draw.randrange(requests)}", draw.random() < 0.5),
        lambda: Leave(when, f"r{draw.randrange(requests)}", draw.choice([None, 0, 1])),
    ]
    return draw.choice(choices)()


def random_mangling(draw: random.Random) -> Mangling:
    """What happens to some messages of a kind, or to a few of all."""
    how = draw.choice(get_args(Manner))
    seconds = draw.choice([0.001, 0.05, 0.6])
    if draw.random() < 0.5:
        return Mangling(how, None, chance=draw.choice([0.01, 0.05]), times=1000, seconds=seconds)
    kind, skip = draw.choice(KINDS), draw.choice([0, 0, 1, 4])
    return Mangling(how, kind, chance=1.0, times=draw.randint(1, 3), skip=skip, seconds=seconds)
