"""Keys and values of 8 bits through a whole decoder."""

import random
from typing import Any

import pytest
import torch

from pagefleet.wire import unpack_floats
from pagefleet_worker.paging.kv_scales import find_kv_scales
from tests.driver import Driver
from tests.gpu.engines import greedy, random_prompts, require_gpu_or_interpreter, triton_engine

require_gpu_or_interpreter()


def test_logprobs_stay_near_and_the_pool_is_a_quarter(
    prepared_model: Any, device: torch.device, generator: random.Random
) -> None:
    folder, prompts = prepared_model("llama"), random_prompts(generator, 2, 20)
    whole, rounded = triton_engine(folder, device), triton_engine(folder, device, eight_bits=True)
    assert rounded.pool.nbytes * 4 == whole.pool.nbytes
    expected = Driver(whole).run(prompts, [greedy(1)] * 2)
    found = Driver(rounded, chunk=8).run(prompts, [greedy(1)] * 2)
    for near, exact in zip(found, expected, strict=True):
        assert not near.errors
        left, right = (unpack_floats(each.logprobs[0].top)[0] for each in (near, exact))
        assert left == pytest.approx(right, abs=0.3)
        assert left != right


def test_scales_are_found_with_the_kernels(prepared_model: Any, device: torch.device) -> None:
    decoder = triton_engine(prepared_model("llama"), device).decoder
    assert find_kv_scales(decoder, 16, 20).device.type == device.type
