"""From a prepared model and a worker's settings to a torch engine that is ready to serve."""

import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pagefleet.manifest import Manifest
from pagefleet.settings import WorkerSettings
from pagefleet_kernels.dispatch import select
from pagefleet_worker.grammar import Grammars
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.model.config import ARCHITECTURES
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.ranks import ALONE, Ranks
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.model_loading import Means, choose_device, load_model
from pagefleet_worker.numerics import keeps_promise, numerics_class
from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.causal_model import CausalModel
from pagefleet_worker.paging.device_slots import DeviceSlots
from pagefleet_worker.paging.kv_scales import find_kv_scales
from pagefleet_worker.paging.pools import (
    choose_size,
    make_host_pool,
    make_pool,
    measure_swap,
    populate,
)
from pagefleet_worker.paging.slots import Row, Slot
from pagefleet_worker.paging.swaps import Swaps, lane_of
from pagefleet_worker.paging.transfer import use
from pagefleet_worker.step.engine import TorchEngine
from pagefleet_worker.step.graphs import LEAST, CudaCapture, graph_sizes
from pagefleet_worker.step.inputs import DeviceInputs
from pagefleet_worker.step.rehearsal import rehearse
from pagefleet_worker.step.team import Team

_log = logging.getLogger(__name__)

_STEP_TOKENS = {"cpu": 1024, "cuda": 2048}
"""That a step may hold by default: a GPU's products are at their best from so many rows on, and
Python orders each kernel for more of them."""


@dataclass(frozen=True)
class Limits:
    """How large the steps of a worker may be."""

    tokens: int
    """Of a step."""
    length: int
    """Tokens of a sequence."""
    sequences: int
    block_size: int

    @classmethod
    def of(cls, settings: WorkerSettings, device: torch.device, possible: int) -> "Limits":
        """Those of the settings; the model knows `possible` positions.

        Raises:
            ModelError: it knows too few.
        """
        return cls(
            settings.max_num_batched_tokens or _STEP_TOKENS[device.type],
            _choose_length(settings.max_model_len, possible),
            settings.max_num_seqs,
            settings.block_size,
        )


def load_engine(
    folder: Path,
    settings: WorkerSettings,
    progress: Callable[[], None],
    ranks: Ranks = ALONE,
) -> TorchEngine:
    """Load the prepared model in `folder`, or this rank's share of it, and make everything that its
    steps need.

    `progress` is called at every layer of every step, and while the weights are read.

    Raises:
        ModelError: the model cannot be served as it is, or not with these settings.
        pagefleet.manifest.ManifestError: the folder is no prepared model.
    """
    try:
        return _load_engine(folder, settings, progress, ranks)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "The GPU has too little memory for this model and these settings. Free it from other "
            "processes, or lower --gpu-memory-utilization or --kv-cache-memory, "
            f"--max-num-batched-tokens or --max-num-seqs. {error}"
        ) from error


def _load_engine(
    folder: Path, settings: WorkerSettings, progress: Callable[[], None], ranks: Ranks
) -> TorchEngine:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    manifest = Manifest.load(folder)
    device = choose_device(settings.device)
    use(device)
    limits = Limits.of(settings, device, manifest.max_model_len)
    kernels = select(device, invariant=settings.batch_invariant)
    if settings.block_size % kernels.block_multiple:
        raise ModelError(
            f"--block-size {settings.block_size} does not suit this device's kernels: they need a "
            f"multiple of {kernels.block_multiple}."
        )
    means = Means(device, kernels, limits.length, progress, ranks)
    decoder = load_model(folder, manifest, settings, means)
    if settings.kv_cache_dtype == "fp8":
        _keep_kv_in_8_bits(decoder, limits)
    kept = decoder.kv_dtype
    shape = decoder.config
    size = choose_size(shape, settings, kept, device, lambda: run_full_step(decoder, limits))
    size = replace(size, blocks=ranks.least(size.blocks, device))
    _log.info("%s", size)
    spare = device.type == "cuda"  # rows that pad a graph's batch write to a block of their own
    pool = make_pool(shape, size.blocks + spare, settings.block_size, kept, device)
    host_pool = make_host_pool(pool, settings.swap_space or 0)
    costs = {} if host_pool is None else _measure_costs(decoder, limits, pool, host_pool)
    longest = min(limits.length, limits.tokens)
    exact = keeps_promise(kernels, decoder, limits.block_size, longest, manifest.weights)
    facts = EngineFacts(
        fingerprint=manifest.fingerprint,
        numerics=numerics_class(kernels, decoder, settings, ranks, exact=exact),
        block_size=limits.block_size,
        blocks=size.blocks,
        slots=limits.sequences,
        max_model_len=min(limits.length, size.blocks * limits.block_size),
        max_batched_tokens=limits.tokens,
        vocab_size=shape.vocab_size,
        host_blocks=0 if host_pool is None else host_pool.shape[2],
        exact=exact,
        **costs,
    )
    grammars = Grammars.load(folder, manifest)
    grammars.warm_up()
    inputs = _device_inputs(decoder, pool, facts, settings, progress) if spare else None
    swaps = Swaps(pool, host_pool, lane_of(device)) if host_pool is not None else None
    team = None
    if device.type == "cpu":
        populate(pool)
        team = Team(torch.get_num_threads())
    engine = TorchEngine(
        facts, decoder, kernels, pool,
        inputs=inputs, grammars=grammars, swaps=swaps, team=team, ranks=ranks,
    )  # fmt: skip
    if device.type == "cuda":
        began = time.perf_counter()
        rehearse(engine, decoder.adapters)
        _log.info("kernels are compiled after %.1f s", time.perf_counter() - began)
    return engine


def _keep_kv_in_8_bits(decoder: CausalModel, limits: Limits) -> None:
    if not isinstance(decoder, Decoder):
        raise ModelError(
            "Keys and values of 8 bits are there for the architectures "
            f"{', '.join(ARCHITECTURES)}: leave out --kv-cache-dtype."
        )
    if decoder.config.latent is not None:
        raise ModelError(
            f"What a {decoder.config.architecture} model keeps of a token is a latent, of which "
            "there is no form in 8 bits: leave out --kv-cache-dtype."
        )
    limit = min(limits.length, limits.tokens)
    decoder.keep_kv_in_8_bits(find_kv_scales(decoder, limits.block_size, limit))


def _device_inputs(
    decoder: CausalModel,
    pool: Tensor,
    facts: EngineFacts,
    settings: WorkerSettings,
    progress: Callable[[], None],
) -> DeviceInputs:
    inputs = DeviceInputs(decoder, pool, DeviceSlots.of(facts, pool.device), progress)
    if not settings.enforce_eager and isinstance(decoder, Decoder):
        began = time.perf_counter()
        sizes = graph_sizes(min(max(facts.slots, LEAST), facts.max_batched_tokens))
        inputs.capture(sizes, CudaCapture())
        _log.info("%d CUDA graphs in %.1f s", len(sizes), time.perf_counter() - began)
    return inputs


def _measure_costs(
    decoder: CausalModel, limits: Limits, pool: Tensor, host_pool: Tensor
) -> dict[str, float]:
    """Microseconds to move a block and to compute a token: what the scheduler weighs."""
    run_full_step(decoder, limits)
    began = time.perf_counter()
    run_full_step(decoder, limits)
    if pool.device.type == "cuda":
        torch.cuda.synchronize(pool.device)
    compute = (time.perf_counter() - began) / limits.tokens * 1e6
    move = measure_swap(pool, host_pool)
    _log.info(
        "%d host blocks; moving one takes %.0f us, computing a token %.0f us",
        host_pool.shape[2],
        move,
        compute,
    )
    return {"swap_micros": move, "compute_micros": compute}


@torch.inference_mode()
def run_full_step(decoder: CausalModel, limits: Limits) -> None:
    """Compute the largest step there can be, on a small pool of its own.

    It has as many tokens as a step may have, in the longest rows, which all share one table, and
    logits for as many sequences as may run.
    """
    tokens, block_size = limits.tokens, limits.block_size
    longest = min(tokens, limits.length)
    blocks = -(-longest // block_size)
    pool = make_pool(decoder.config, blocks, block_size, decoder.kv_dtype, decoder.device)
    slot = Slot.bare(range(blocks), decoder.adapters)
    zeros = array("i", [0]) * longest
    rows = [
        Row(number, slot, 0, zeros[: tokens - start], 0)
        for number, start in enumerate(range(0, tokens, longest))
    ]
    hidden = decoder.hidden(Batch.of(rows, block_size, decoder.device), pool)
    sampled = min(limits.sequences, tokens)
    decoder.logits(hidden, torch.arange(sampled, device=decoder.device))


def _choose_length(wanted: int | None, possible: int) -> int:
    if wanted is not None and wanted > possible:
        raise ModelError(
            f"The model knows {possible} positions; --max-model-len {wanted} is more. "
            "Lower it, or leave it out."
        )
    return wanted or possible
