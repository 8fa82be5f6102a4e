"""Mixtures of experts: feed-forward parts of which each row goes through some (Shazeer et al.,
"Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", ICLR 2017).

A router scores the experts for a row. The row takes the best of them, and its output is the sum of
theirs, weighted by the softmax of the scores, which may be made to sum up to 1 over those that it
takes (so in Jiang et al., "Mixtral of experts", 2024, section 2.1, and in the Qwen3 technical
report, 2025, section 2). Beside them it may take experts that are shared by all rows; these stand
behind the others, and one more score of the router says by its sigmoid how much they count (Qwen2
technical report, 2024, section 2.2.2).

All products may have biases, that of the router too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from pagefleet_kernels.layers import Activation
from pagefleet_kernels.quantized import Matrix, Quantized


@dataclass(frozen=True)
class Routing:
    """Which experts a row takes.

    chosen: how many that it chooses.
    renormalized: whether their weights are made to sum up to 1.
    shared: how many that all rows take.
    """

    chosen: int
    renormalized: bool
    shared: int = 0

    @property
    def taken(self) -> int:
        """Experts of each row."""
        return self.chosen + self.shared


@dataclass(frozen=True)
class Experts:
    """A feed-forward part of experts, whose matrices lie one below the other.

    router: [experts to choose from, size], and a row more if there are shared experts.
    gate_up: [experts * 2 * inner, size], of each expert its gates, then its values.
    down: [experts * size, inner].
    router_bias, gate_up_bias, down_bias: a number for each of their rows.
    activation: of the gates.
    """

    router: Tensor
    gate_up: Matrix
    down: Matrix
    routing: Routing
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = Activation.SILU

    @property
    def choices(self) -> int:
        """Experts that a row chooses from."""
        return len(self.router) - (self.routing.shared > 0)

    @property
    def count(self) -> int:
        """All of them."""
        return self.choices + self.routing.shared

    def parts(
        self, matrix: Matrix, bias: Tensor | None = None
    ) -> Iterator[tuple[Matrix, Tensor | None]]:
        """What each expert has of one of the matrices, and of its bias."""
        rows = matrix.shape[0] // self.count
        for first in range(0, matrix.shape[0], rows):
            own = slice(first, first + rows)
            own_bias = None if bias is None else bias[own]
            if isinstance(matrix, Quantized):
                yield matrix.part(own, slice(0, matrix.shape[1])), own_bias
            else:
                yield matrix[own], own_bias
