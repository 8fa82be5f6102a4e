"""Steps of every kind, run once before a worker says Hello, so that none waits for a compiler.

Triton compiles a kernel anew for one row, for a multiple of 16 and for other numbers, for few
tokens a row and for many, and with or without splits. What is compiled is kept on disk.
"""

from array import array

from pagefleet.params import SamplingParams
from pagefleet.wire import SAMPLED, Open, Plan, checksum, pack_ints
from pagefleet_worker.interface import Engine

_SCENES = ((1, 1 << 20), (1, 17), (3, 5), (16, 5))
"""(rows, tokens of each); both are lowered to what the engine takes."""

_PARAMS = SamplingParams(
    max_tokens=2, seed=0, top_p=0.9, logprobs=1, prompt_logprobs=1, frequency_penalty=0.1
)


def rehearse(engine: Engine) -> None:
    """Play every scene, a prefill and a decode step, in an epoch that is then forgotten."""
    facts = engine.facts
    for rows, count in _SCENES:
        rows = min(rows, facts.slots, facts.max_batched_tokens)
        count = min(count, facts.max_batched_tokens // rows, facts.max_model_len)
        engine.reset()
        _play(engine, rows, count)
    engine.reset()


def _play(engine: Engine, rows: int, count: int) -> None:
    """Rows of zeros that all have the same blocks."""
    facts = engine.facts
    table = array("i", range(-(-facts.max_model_len // facts.block_size)))
    crc = checksum(pack_ints(table))

    def plan(step: int, start: int, tokens: int, token: int) -> Plan:
        fields = [(slot, start, tokens, 1, len(table), crc) for slot in range(rows)]
        packed = pack_ints(each for row in fields for each in row)
        opens, deltas, copies = [], [], [0, 1] if facts.blocks > 1 else []
        if step == 0:
            prompt = pack_ints([0] * tokens)
            opens = [Open(slot, _PARAMS, prompt, b"", [0]) for slot in range(rows)]
            entries = [(slot, *entry) for slot in range(rows) for entry in enumerate(table)]
            deltas = [each for entry in entries for each in entry]
        inputs = pack_ints([token] * (rows * tokens))
        changes = {"tables": pack_ints(deltas), "copies": pack_ints(copies)}
        return Plan(0, step, packed, inputs, opens=opens, **changes)

    engine.launch(plan(0, 0, count, 0)).result()
    if count < facts.max_model_len:
        engine.launch(plan(1, count, 1, SAMPLED)).result()
