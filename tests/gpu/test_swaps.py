"""Blocks that are swapped while steps run: no step reads or loses one too early."""

import random

import torch

from pagefleet_worker.paging.pools import make_host_pool
from pagefleet_worker.paging.slots import Step
from pagefleet_worker.paging.swaps import Swaps, lane_of
from pagefleet_worker.paging.transfer import to_device
from tests.gpu.engines import require_gpu_or_interpreter

require_gpu_or_interpreter()

BLOCKS, HOST_BLOCKS, STEPS = 40, 30, 60


def test_contents_follow_the_plans(device: torch.device, generator: random.Random) -> None:
    """Every step fills the blocks that it swapped out with its number, after long work; no plan
    moves a block that the step before it filled.
    """
    pool = torch.zeros(4, 2, BLOCKS, 2, 16, 64, device=device)
    host = make_host_pool(pool, HOST_BLOCKS * (pool.nbytes // BLOCKS))
    assert host is not None
    swaps = Swaps(pool, host, lane_of(device))
    on_device, on_host = [0.0] * BLOCKS, [0.0] * HOST_BLOCKS
    size = 1500 if device.type == "cuda" else 1  # elsewhere nothing goes on beside a step
    delay = torch.randn(size, size, device=device)
    filled: list[int] = []
    for number in range(1, STEPS):
        still = sorted(set(range(BLOCKS)) - set(filled))
        generator.shuffle(still)
        filled, targets = still[:3], still[3:6]
        out = list(zip(filled, generator.sample(range(HOST_BLOCKS), 3), strict=True))
        back = list(zip(generator.sample(range(HOST_BLOCKS), 3), targets, strict=True))
        step = Step(1, number, [], [], [], [], out, back)
        swaps.take_out(step)
        swaps.bring_in(step)
        pool[:, :, to_device(filled, device)] = number + 0 * (delay @ delay)[0, 0].abs()
        swaps.end(step)
        for device_block, host_block in out:
            on_host[host_block] = on_device[device_block]
            on_device[device_block] = float(number)
        for host_block, device_block in back:
            on_device[device_block] = on_host[host_block]
    if device.type == "cuda":
        torch.cuda.synchronize()
    for contents, expected in ((pool, on_device), (host, on_host)):
        for block, value in enumerate(expected):
            assert bool((contents[:, :, block] == value).all())
