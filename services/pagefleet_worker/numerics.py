"""What a worker promises of its bits: workers of one class compute equal ones, so that a stream
that goes on at another of them is the one that it would have been.
"""

import hashlib
import logging
import secrets
from importlib.metadata import version

import torch

from pagefleet.manifest import Weights
from pagefleet.settings import WorkerSettings
from pagefleet_kernels.dispatch import Kernels
from pagefleet_worker.checkpoints.safetensors_files import first_without_numbers
from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.ranks import Ranks
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.paging.causal_model import CausalModel
from pagefleet_worker.step.selftest import is_exact

_log = logging.getLogger(__name__)


def keeps_promise(
    kernels: Kernels, decoder: CausalModel, block_size: int, longest: int, weights: Weights
) -> bool:
    """Whether a row's bits depend on nothing but its sequence: what is promised is tried out, with
    as many tokens as a step and a sequence may have, `longest`.

    Raises:
        ModelError: the model computes NaN.
    """
    if not kernels.invariant:
        return False
    try:
        exact = is_exact(decoder, block_size, longest)
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


def numerics_class(
    kernels: Kernels,
    decoder: CausalModel,
    settings: WorkerSettings,
    ranks: Ranks,
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
    kinds = decoder.kinds if isinstance(decoder, Decoder) else ()
    if kinds:
        own = f"own-{'-'.join(kinds)}"
        name += f" {own if settings.quantization == 'auto' else settings.quantization}"
    if isinstance(decoder, Decoder) and decoder.kv_scales is not None:
        scales = ranks.beside(decoder.kv_scales.view(1, -1)).cpu().numpy().tobytes()
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
