"""Engines with the kernels of a GPU, on a GPU or interpreted."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pagefleet.manifest import Manifest
from pagefleet.params import SamplingParams
from pagefleet_kernels.dispatch import select
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.model.config import load_config
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.lora import read_adapter
from pagefleet_worker.model.weights import PLAIN, Quantization, load_weights
from pagefleet_worker.paging.device_slots import DeviceSlots
from pagefleet_worker.paging.kv_scales import find_kv_scales
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.step.engine import TorchEngine
from pagefleet_worker.step.graphs import CudaCapture
from pagefleet_worker.step.inputs import DeviceInputs
from tests.driver import Stream

NAN_IN_8_BITS = 0x7F
BLOCK_SIZE, BLOCKS, SLOTS, LENGTH = 16, 60, 8, 256


def require_gpu_or_interpreter() -> None:
    """Skip a module where its kernels cannot run."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU; test_interpreted.py runs it, interpreted", allow_module_level=True)


def triton_decoder(
    folder: Path, device: torch.device, *, invariant: bool, quantization: Quantization = PLAIN
) -> Decoder:
    manifest, config = Manifest.load(folder), load_config(folder)
    weights = load_weights(
        manifest.weights, config, torch.float32, device, lambda done, total: None, quantization
    )
    kernels = select(torch.device("cuda"), invariant=invariant)
    adapters = [read_adapter(Path(each.folder), config) for each in manifest.adapters]
    changes = [each.layers(config, torch.float32, device) for each in adapters]
    return Decoder(config, weights, kernels, LENGTH, lambda: None, changes=changes)


def triton_engine(
    folder: Path,
    device: torch.device,
    *,
    invariant: bool = False,
    eight_bits: bool = False,
    sizes: tuple[int, ...] = (),
    quantization: Quantization = PLAIN,
) -> TorchEngine:
    """An engine in float32, with graphs of `sizes`."""
    decoder = triton_decoder(folder, device, invariant=invariant, quantization=quantization)
    if eight_bits:
        decoder.keep_kv_in_8_bits(find_kv_scales(decoder, BLOCK_SIZE, 30))
    vocabulary = decoder.config.vocab_size
    facts = EngineFacts("model", "class", BLOCK_SIZE, BLOCKS, SLOTS, LENGTH, 512, vocabulary)
    pool = make_pool(decoder.config, BLOCKS + 1, BLOCK_SIZE, decoder.kv_dtype, device)
    pool.fill_(NAN_IN_8_BITS if eight_bits else torch.nan)
    inputs = DeviceInputs(decoder, pool, DeviceSlots.of(facts, device), lambda: None)
    if sizes:
        inputs.capture(sizes, CudaCapture())
    return TorchEngine(facts, decoder, decoder.kernels, pool, inputs=inputs)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fails where torch would make the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_prompts(generator: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    return [generator.choices(range(256), k=generator.randint(1, longest)) for _ in range(count)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=0, temperature=0, logprobs=2)


def seen(stream: Stream) -> tuple[object, ...]:
    """Everything that a client gets of a stream, to the bit."""
    logprobs = [(each.chosen, each.top_ids, each.top) for each in stream.logprobs]
    return stream.output, logprobs, stream.errors
