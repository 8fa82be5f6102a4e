"""What low-rank adapters add to a linear layer: y = W x + scale * B (A x) for each of some outputs
(Hu et al., "LoRA", 2021).

Rows of a step that belong to different adapters share the product with W; each adds what its own
adapter makes of it (Chen et al., "Punica", and Sheng et al., "S-LoRA", 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """An adapter's change to the `len(up)` outputs of a layer from `first` on.

    first: of the layer's outputs, where several matrices are stacked in one.
    down: A, [rank, inputs], in the dtype of the layer's inputs.
    up: B, [outputs, rank], in the same.
    scale: of the product.
    """

    first: int
    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Width of what lies between the factors."""
        return len(self.down)


Loras: TypeAlias = Sequence[Sequence[Factors]]
"""What each adapter of a model changes in one layer, with no output changed twice by one."""
