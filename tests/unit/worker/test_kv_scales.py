from dataclasses import replace

import pytest
import torch

from pagefleet.settings import WorkerSettings
from pagefleet_worker.kv_scales import LARGEST, find_kv_scales, scales_for
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model_files import ModelError

SETTINGS = WorkerSettings(num_blocks=40, max_num_seqs=4, device="cpu", dtype="float32")


def test_scales_are_powers_of_two_that_leave_room():
    largest = torch.tensor([0.0, 448.0, 224.0, 1e-3, 700.0])
    scales = scales_for(largest)
    assert scales[:3].tolist() == [1.0, 2.0, 1.0]
    assert torch.equal(torch.frexp(scales).mantissa, torch.full((5,), 0.5))
    taken = largest[1:] / scales[1:] / LARGEST
    assert bool(((taken <= 0.5) & (taken > 0.25)).all())


def test_scales_do_not_depend_on_the_size_of_blocks(prepared_model):
    decoder = load_engine(prepared_model("qwen3"), SETTINGS, lambda: None).decoder
    scales = find_kv_scales(decoder, 16, 512)
    assert scales.shape == (3, 2, 2)
    assert torch.equal(find_kv_scales(decoder, 48, 512), scales)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full((3, 2, 2), 0.5))


def test_a_cpu_keeps_no_keys_of_8_bits(prepared_model):
    with pytest.raises(ModelError, match="there for GPUs"):
        load_engine(prepared_model("llama"), replace(SETTINGS, kv_cache_dtype="fp8"), lambda: None)
