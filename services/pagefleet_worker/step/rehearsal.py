"""Steps of every kind, run once before a worker says Hello, so that none waits for a compiler.

Triton compiles a kernel anew for decode steps and for others, with and without splits of the
context. What is compiled is kept on disk.
"""

from array import array
from itertools import pairwise

import msgspec

from pagefleet.params import SamplingParams
from pagefleet.wire import SAMPLED, Open, Plan, checksum, pack_ints
from pagefleet_worker.interface import Engine
from pagefleet_worker.step.graphs import LONGEST_ROW

_LAST_CHUNK = LONGEST_ROW + 1
"""Tokens of a prompt's last chunk: few beside a long context, so that it is split, and more than
a step that is replayed has."""

_SCENES = ((1, 2048), (1, 2 * _LAST_CHUNK), (3, 5))
"""(rows, tokens of each prompt); both are lowered to what the engine takes."""

_PARAMS = SamplingParams(
    max_tokens=2, seed=0, top_p=0.9, logprobs=1, prompt_logprobs=1, frequency_penalty=0.1
)


def rehearse(engine: Engine, adapter: int = 0) -> None:
    """Play every scene, prompts in chunks and a decode step, in an epoch that is then forgotten;
    all rows have the same LoRA adapter, if there is one.
    """
    facts = engine.facts
    for rows, count in _SCENES:
        rows = min(rows, facts.slots, facts.max_batched_tokens)
        engine.reset()
        _play(engine, rows, min(count, facts.max_model_len), adapter)
    engine.reset()


def _play(engine: Engine, rows: int, count: int, adapter: int) -> None:
    """Rows of zeros that all have the same blocks."""
    facts, params = engine.facts, msgspec.structs.replace(_PARAMS, adapter=adapter)
    table = array("i", range(-(-facts.max_model_len // facts.block_size)))
    crc = checksum(pack_ints(table))

    def plan(step: int, start: int, end: int, token: int) -> Plan:
        fields = [(slot, start, end - start, end >= count, len(table), crc) for slot in range(rows)]
        packed = pack_ints(each for row in fields for each in row)
        opens, deltas, copies = [], [], [0, 1] if facts.blocks > 1 else []
        if step == 0:
            prompt = pack_ints([0] * count)
            opens = [Open(slot, params, prompt, b"", [0]) for slot in range(rows)]
            entries = [(slot, *entry) for slot in range(rows) for entry in enumerate(table)]
            deltas = [each for entry in entries for each in entry]
        inputs = pack_ints([token] * (rows * (end - start)))
        changes = {"tables": pack_ints(deltas), "copies": pack_ints(copies)}
        return Plan(0, step, packed, inputs, opens=opens, **changes)

    chunk = facts.max_batched_tokens // rows
    last = count - min(count, chunk, _LAST_CHUNK)
    borders = [*range(0, last, chunk), last, count]
    for step, (start, end) in enumerate(pairwise(borders)):
        engine.launch(plan(step, start, end, 0)).result()
    if count < facts.max_model_len:
        engine.launch(plan(len(borders) - 1, count, count + 1, SAMPLED)).result()
