"""Which quantized checkpoints are read: a table from the `quant_method` of a config to its format.

What is not in it is refused, and so is what a format does not know: a model that is read almost
right is worse than one that does not start.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pagefleet_worker.checkpoints.awq import Awq
from pagefleet_worker.checkpoints.compressed import CompressedTensors
from pagefleet_worker.checkpoints.fp8 import Fp8
from pagefleet_worker.checkpoints.gptq import Gptq
from pagefleet_worker.checkpoints.mxfp4 import Mxfp4
from pagefleet_worker.checkpoints.stored_matrix import Format
from pagefleet_worker.model_files import ModelError

_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def format_of(config: Mapping[str, Any]) -> Format | None:
    """How the weights of a model with this config are stored; None if they are not quantized.

    Raises:
        ModelError: in a way that is not supported; a sentence says which.
    """
    values = config.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ModelError(f"The model's quantization_config is malformed: {values!r}.")
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        raise ModelError(
            f"The weights are quantized by {method!r}, which is not supported; these are: "
            f"{', '.join(_FORMATS)}."
        )
    return _FORMATS[method](values)
