"""50,000 requests, three in ten of them aborted: every block is free in the end, and nothing grows.

`python -m tests.unit.scheduler.test_soak` prints resident memory as it goes.
"""

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagefleet.params import SamplingParams
from tests.echo_cell import EchoCell

REQUESTS = 50_000
ROUND = 200
"""Requests that come at once; the cell is idle between two rounds."""

ABORTS = ROUND * 3 // 10
"""Of them, at random moments."""

GROWTH = 2 << 20
"""Bytes that resident memory may grow by after the first tenth."""


def resident() -> int:
    """Bytes of this process that are in memory, once its garbage is gone."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(rng: random.Random) -> Iterator[int]:
    """Serve all requests, and give the resident memory after every tenth of them."""
    cell = EchoCell(
        blocks=80,
        slots=16,
        budget=64,
        host_blocks=20,
        compute_micros=100.0,
        drafts=2,
        check=False,
    )
    worker = cell.join()
    for served in range(ROUND, REQUESTS + 1, ROUND):
        submit_some(cell, rng)
        aborts = 0
        while cell.step(worker):
            open_ones = [request for request, client in cell.clients.items() if client.open]
            if open_ones and aborts < ABORTS:
                cell.abort(rng.choice(open_ones))
                aborts += 1
        assert aborts == ABORTS
        cell.scheduler.check()
        cell.assert_idle()
        if served % (REQUESTS // 10) == 0:
            cell.compare()
            yield resident()
        cell.clients.clear()


def submit_some(cell: EchoCell, rng: random.Random) -> None:
    """A round: samples, a few beams, and prompts that often begin alike."""
    for _ in range(ROUND):
        beginning = [rng.randrange(4)] * rng.randrange(12)
        prompt = beginning + [rng.randrange(200) for _ in range(rng.randrange(1, 20))]
        width = 3 * (rng.random() < 0.05)
        params = SamplingParams(
            max_tokens=rng.randrange(1, 16),
            seed=rng.randrange(2**32),
            temperature=rng.choice([0.0, 1.0]),
            eos_token_ids=(3,),
            beam_width=width,
        )
        choices = 1 if width or rng.random() < 0.8 else rng.randrange(2, 5)
        cell.submit(prompt, params, choices)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_blocks_and_memory_come_back() -> None:
    seed = random.randrange(2**32)
    figures = list(soak(random.Random(seed)))
    assert len(figures) == 10
    assert figures[-1] - figures[0] < GROWTH, (seed, figures)


if __name__ == "__main__":
    for part, size in enumerate(soak(random.Random(0)), 1):
        print(f"{part * REQUESTS // 10:>6} requests: {size / 2**20:.2f} MiB", flush=True)
