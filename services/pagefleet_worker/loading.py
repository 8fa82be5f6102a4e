"""From a prepared model and a worker's settings to a torch engine that is ready to serve."""

import hashlib
import logging
import secrets
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from pagefleet.manifest import Manifest, Weights
from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet_kernels.dispatch import Kernels, select
from pagefleet_worker.checkpoints.safetensors_files import first_without_numbers
from pagefleet_worker.grammar import Grammars
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.model.config import ARCHITECTURES, DecoderConfig
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.ranks import ALONE, Ranks
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.model_loading import Means, choose_device, load_model
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
from pagefleet_worker.step.selftest import is_exact
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
    exact = _is_exact(kernels, decoder, limits, manifest.weights)
    facts = EngineFacts(
        fingerprint=manifest.fingerprint,
        numerics=_numerics_class(kernels, decoder, settings, exact=exact),
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
    params = SamplingParams(max_tokens=0, seed=0, adapter=decoder.adapters)
    slot = Slot(params, longest, array("i"), [0], b"")
    slot.table.extend(range(blocks))
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


def _is_exact(kernels: Kernels, decoder: CausalModel, limits: Limits, weights: Weights) -> bool:
    """Whether a row's bits depend on nothing but its sequence: what is promised is tried out."""
    if not kernels.invariant:
        return False
    rows = min(limits.length, limits.tokens)
    try:
        exact = is_exact(decoder, limits.block_size, rows)
    except FloatingPointError as error:
        raise ModelError(_why_nan(weights, decoder.dtype)) from error
    if not exact:
        _log.warning("This machine's products depend on the batch: streams that are moved or "
                     "preempted may go on differently. Try another --dtype.")  # fmt: skip
    return exact


def _why_nan(weights: Weights, dtype: torch.dtype) -> str:
    if weights.kind == "safetensors":
        for path in weights.paths:
            if (name := first_without_numbers(path)) is not None:
                return (
                    f"The tensor {name!r} in {path} holds NaN or infinity: the model's training "
                    "failed, or the file is damaged. Download or save it again."
                )
    return (
        f"The model computes NaN: it has numbers that are too large for {dtype}, or its files hold "
        "NaN. Try another --dtype, or another file."
    )


def _numerics_class(
    kernels: Kernels,
    decoder: CausalModel,
    settings: WorkerSettings,
    *,
    exact: bool,
) -> str:
    """What decides every bit of a stream beside the model; the number of threads does not.

    oneDNN chooses its code by a CPU's instructions and cuts matrices by the size of its caches. The
    scales of keys and values of 8 bits depend on the step that they are found in, the factors of
    longrope on the longest sequence that is served. A machine that does not keep its promise is
    alone in its class, as is a GPU that gives none.
    """
    device = decoder.device
    if device.type == "cpu":
        traits = torch.cpu.get_capabilities().items()
        decisive = sorted((key, value) for key, value in traits if not key.startswith("num_"))
        unit = hashlib.sha256(repr(decisive).encode()).hexdigest()[:12]
    else:
        unit = torch.cuda.get_device_name(device)
    name = str(decoder.dtype).removeprefix("torch.")
    bits = decoder.bits if isinstance(decoder, Decoder) else ()
    if bits:
        own = "own-" + "-".join(map(str, bits))
        name += f" {own if settings.quantization == 'auto' else settings.quantization}"
    if isinstance(decoder, Decoder) and decoder.kv_scales is not None:
        scales = decoder.kv_scales.cpu().numpy().tobytes()
        name += f" kv-e4m3-{hashlib.sha256(scales).hexdigest()[:8]}"
    if isinstance(decoder, Decoder) and decoder.config.stretched:
        name += " longrope"
    if settings.tensor_parallel_size > 1:
        name += f" tp-{settings.tensor_parallel_size}"
    computed_by = kernels.name
    if not isinstance(decoder.config, DecoderConfig):
        computed_by += f" transformers-{version('transformers')}"
    unit = f"torch-{torch.__version__} {device.type}-{unit}"
    alone = "" if exact else f" inexact-{secrets.token_hex(4)}"
    return f"{computed_by} {unit} {name} block-{settings.block_size}{alone}"
