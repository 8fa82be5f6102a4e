from dataclasses import replace

import pytest
import torch

from pagefleet.settings import WorkerSettings
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.ranks import Ranks
from pagefleet_worker.model.shares import Share
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.numerics import numerics_class
from pagefleet_worker.paging.kv_scales import LARGEST, find_kv_scales, scales_for

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


def test_every_worker_finds_the_same(prepared_model):
    """Or it is of another numerics class, where the step that shows them is shorter."""
    eight_bits = replace(SETTINGS, kv_cache_dtype="fp8", dtype="bfloat16")
    engines = [
        load_engine(prepared_model("qwen3"), settings, lambda: None)
        for settings in (
            replace(eight_bits, threads=1),
            replace(eight_bits, threads=2, block_size=16, num_blocks=7),
            replace(eight_bits, max_num_batched_tokens=1),
            replace(SETTINGS, dtype="bfloat16"),
        )
    ]
    scales = [engine.decoder.kv_scales for engine in engines[:3]]
    assert torch.equal(scales[0], scales[1])
    assert not torch.equal(scales[0], scales[2])
    numerics = [engine.facts.numerics for engine in engines]
    assert numerics[0] == numerics[1]
    assert len(set(numerics)) == 3
    assert all(engine.facts.exact for engine in engines)


class BesideOthers(Ranks):
    """Rank 0, whose neighbour has the same number everywhere."""

    def __init__(self, number):
        super().__init__(Share(0, 2), in_order=True)
        self._number = number

    def beside(self, columns):
        return torch.cat([columns, torch.full_like(columns, self._number)], 1)


def test_those_of_other_ranks_decide_the_class_too(prepared_model):
    settings = replace(SETTINGS, kv_cache_dtype="fp8", dtype="bfloat16", tensor_parallel_size=2)
    engine = load_engine(prepared_model("qwen3"), settings, lambda: None)
    one, same, other = (
        numerics_class(engine.kernels, engine.decoder, settings, BesideOthers(number), exact=True)
        for number in (0.5, 0.5, 0.25)
    )
    assert one == same != other


def test_a_pool_of_the_same_size_holds_as_many_more_tokens(prepared_model):
    memory = {"kv_cache_memory": 1 << 20, "swap_space": 1 << 20}
    settings = replace(SETTINGS, num_blocks=None, dtype="bfloat16", **memory)
    whole, rounded = (
        load_engine(prepared_model("qwen3"), each, lambda: None)
        for each in (settings, replace(settings, kv_cache_dtype="fp8"))
    )
    assert rounded.facts.blocks == 2 * whole.facts.blocks
    assert rounded.facts.host_blocks == 2 * whole.facts.host_blocks
    assert rounded.pool.nbytes == whole.pool.nbytes


def test_latents_are_not_kept_in_8_bits(prepared_model):
    with pytest.raises(ModelError, match=r"a latent, .* leave out --kv-cache-dtype"):
        load_engine(
            prepared_model("deepseek-v3"), replace(SETTINGS, kv_cache_dtype="fp8"), lambda: None
        )


def test_a_model_of_transformers_keeps_no_keys_of_8_bits(prepared_model):
    with pytest.raises(ModelError, match="there for the architectures"):
        load_engine(
            prepared_model("starcoder2"), replace(SETTINGS, kv_cache_dtype="fp8"), lambda: None
        )
