"""The tensors of safetensors files, by name. They are mapped into memory: what is not read costs
nothing, and nothing is ever unpickled.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagefleet_worker.checkpoints.expert_names import Part, common_name, expert_parts
from pagefleet_worker.model_files import ModelError, open_safetensors

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_INNER, _TEXT_MODEL = "model.", "language_model."


class TensorFiles:
    """Any number of files that hold one model.

    What was saved without its head, as models for embeddings are, has no `model.` before its names;
    the text model of one that sees has `language_model.` before it, or behind.
    """

    def __init__(self, paths: Sequence[str], *, interleaved_experts: bool = False) -> None:
        """`interleaved_experts`: see `expert_parts`."""
        files = [open_safetensors(path, "pt") for path in paths]
        held = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        plain = {name: common_name(name.replace(_TEXT_MODEL, "", 1)) for name in held}
        prefix = "" if any(name.startswith(_INNER) for name in plain.values()) else _INNER
        self._tensors: dict[str, tuple[Any, str, Part | None]] = {}
        for name, file in held.items():
            common = prefix + plain[name]
            self._tensors[common] = file, name, None
            shape = file.get_slice(name).get_shape()
            for each, part in expert_parts(common, shape, interleaved=interleaved_experts):
                self._tensors[each] = file, name, part

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str, dimensions: int | None = None) -> tuple[int, ...]:
        """Of the tensor `name`.

        Raises:
            ModelError: there is none, or it has not so many `dimensions`.
        """
        shape = tuple(self._tensor(name).shape)
        if dimensions not in (None, len(shape)):
            raise ModelError(f"The tensor {name!r} has the shape {list(shape)}.")
        return shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor `name`.

        Raises:
            ModelError: there is none.
        """
        return self._tensor(name).dtype

    def read(
        self, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype] = FLOATS
    ) -> Tensor:
        """The tensor `name`.

        Raises:
            ModelError: there is none, or it has another shape, or a type that is not among
                `dtypes`.
        """
        tensor = self._tensor(name)
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"The tensor {name!r} is {tensor.dtype}, and by the config it should be "
                f"{' or '.join(map(str, dtypes))}."
            )
        if tensor.shape != torch.Size(shape):
            raise ModelError(
                f"The tensor {name!r} has the shape {list(tensor.shape)}, but the config "
                f"says {list(shape)}."
            )
        return tensor

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"The weights lack the tensor {name!r} that the config asks for.")
        file, own_name, part = self._tensors[name]
        tensor: Tensor = file.get_tensor(own_name)
        return tensor if part is None else part.of(tensor)


def first_without_numbers(path: str) -> str | None:
    """The name of a tensor in the file that holds NaN or infinity, if there is one."""
    with open_safetensors(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                return str(name)
    return None
