"""How files of safetensors name the matrices of experts, and by which names the decoder asks.

    model.layers.0.mlp.gate.weight                        the router
    model.layers.0.mlp.experts.7.gate_proj.weight         of each expert, as up_proj and down_proj

Mixtral's files have words of their own for these. Some files hold the matrices of all experts of a
layer as one tensor, `experts.gate_up_proj` [experts, gates and values, inputs], `experts.down_proj`
[experts, outputs, inputs].
"""

import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Part: TypeAlias = tuple[int, slice]
"""Which expert, and which of its rows."""

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

_ALL = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


def common_name(name: str) -> str:
    """What the decoder calls the tensor that a file calls so."""
    name = name.replace(".block_sparse_moe.", ".mlp.", 1)
    return re.sub(r"(?<=\d\.)w[123](?=\.)", lambda match: _MIXTRAL[match[0]], name)


def expert_parts(name: str, shape: Sequence[int]) -> Iterator[tuple[str, Part]]:
    """The matrices of single experts in a tensor of all, by their common names; there are none in
    other tensors.
    """
    match = _ALL.fullmatch(name)
    if match is None or len(shape) != 3:
        return
    experts, rows, _ = shape
    kinds = {"down": slice(0, rows)}
    if match[2] == "gate_up":
        kinds = {"gate": slice(0, rows // 2), "up": slice(rows // 2, rows)}
    for expert in range(experts):
        for kind, part in kinds.items():
            yield f"{match[1]}.{expert}.{kind}_proj.weight", (expert, part)
