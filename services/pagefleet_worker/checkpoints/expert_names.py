"""How files of safetensors name the matrices of experts, and by which names the decoder asks.

    model.layers.0.mlp.gate.weight                        the router
    model.layers.0.mlp.experts.7.gate_proj.weight         of each expert, as up_proj and down_proj

Mixtral's and gpt-oss' files have words of their own for these. Some files hold the matrices of all
experts of a layer as one tensor, `experts.gate_up_proj` [experts, gates and values, inputs],
`experts.down_proj` [experts, outputs, inputs].

In those of gpt-oss gates and values take turns. Its matrices are [experts, inputs, outputs]; what
stands beside or in the place of them has the outputs first: `experts.gate_up_proj_bias`, and for
numbers of four bits `experts.gate_up_proj_blocks` and `experts.gate_up_proj_scales`
(`checkpoints.mxfp4`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """What one expert has of a tensor of all: some of its `rows`, of what is `turned` first if it
    is [inputs, outputs].
    """

    expert: int
    rows: slice
    turned: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """It, without a copy."""
        own = tensor[self.expert]
        return (own.T if self.turned else own)[self.rows]


_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

_ALL = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(?:_(bias|blocks|scales))?")


def common_name(name: str) -> str:
    """What the decoder calls the tensor that a file calls so."""
    name = name.replace(".block_sparse_moe.", ".mlp.", 1).replace(".mlp.router.", ".mlp.gate.", 1)
    return re.sub(r"(?<=\d\.)w[123](?=\.)", lambda match: _MIXTRAL[match[0]], name)


def expert_parts(
    name: str, shape: Sequence[int], *, interleaved: bool
) -> Iterator[tuple[str, Part]]:
    """The tensors of single experts in one of all, by their common names; there are none in others.
    `interleaved`: as those of gpt-oss.
    """
    match = _ALL.fullmatch(name)
    if match is None or len(shape) < 2 or (match[3] is not None) > interleaved:
        return
    kinds = {"down": slice(None)}
    if match[2] == "gate_up":
        half = shape[1] // 2
        halves = (slice(0, None, 2), slice(1, None, 2)), (slice(0, half), slice(half, None))
        kinds = dict(zip(("gate", "up"), halves[0 if interleaved else 1], strict=True))
    for expert in range(shape[0]):
        for kind, rows in kinds.items():
            part = Part(expert, rows, turned=interleaved and match[3] is None)
            yield f"{match[1]}.{expert}.{kind}_proj.{match[3] or 'weight'}", part
