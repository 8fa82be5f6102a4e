"""The routing benchmark on conversations whose ideal hit rate is known."""

import gzip
import json
import random
from pathlib import Path

import pytest

from benchmarks.routing import BLOCK, Machine, Replay, read


def write_trace(path: Path, sessions: int, turns: int) -> float:
    """Conversations that grow by two blocks a turn; returns what an endless cache would find."""
    lines, tokens, found = [], 0, 0
    for session in range(sessions):
        start = random.randrange(60_000)
        for turn in range(1, turns + 1):
            blocks = [session * 1000 + number for number in range(2 * turn)]
            line = {"timestamp": start + turn * 60_000, "input_length": len(blocks) * BLOCK}
            lines.append(line | {"output_length": 3, "hash_ids": blocks})
            tokens += len(blocks) * BLOCK
            found += (len(blocks) - 2) * BLOCK
    lines.sort(key=lambda line: line["timestamp"])
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return found / tokens


@pytest.mark.parametrize("workers", [1, 3])
def test_turns_go_where_their_conversation_is_cached(tmp_path: Path, workers: int) -> None:
    ideal = write_trace(tmp_path / "trace.jsonl.gz", sessions=30, turns=4)
    replay = Replay(workers, Machine(blocks=1000))
    replay.run(read(tmp_path / "trace.jsonl.gz", 10**6))
    outcome = replay.outcome()
    assert outcome.hit_rate == pytest.approx(ideal)
    assert outcome.imbalance < 1.5
    assert outcome.preemptions == 0
    assert not replay.scheduler.requests
