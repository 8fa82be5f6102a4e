"""Mixtures of experts: feed-forward parts of which each row goes through some (Shazeer et al.,
"Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", ICLR 2017).

A router scores the experts for a row. The row takes the best of them, and its output is the sum of
theirs, weighted by the softmax of the scores, which may be made to sum up to 1 over those that it
takes (so in Jiang et al., "Mixtral of experts", 2024, section 2.1, and in the Qwen3 technical
report, 2025, section 2). Beside them it may take experts that are shared by all rows; these stand
behind the others, and count whole, or as much as the sigmoid of one more score of the router says
(Qwen2 technical report, 2024, section 2.2.2).

Experts may lie in groups, of which a row opens some, those whose best experts are the best, and
chooses among the experts of these ("DeepSeek-V2", 2024, section 2.2.2). Or each score becomes a
weight by itself, by its sigmoid; experts are chosen by that and a correction, which balances their
loads and is no part of their weights, and groups by the sum of the best two of it ("DeepSeek-V3
technical report", 2024, section 2.1.2).

All products may have biases, that of the router too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from pagefleet_kernels.layers import Activation
from pagefleet_kernels.quantized import Matrix, Quantized

SMALLEST_WEIGHT = 1e-20
"""What is added to a sum of sigmoids that divides, which may be 0."""


@dataclass(frozen=True)
class Routing:
    """Which experts a row takes.

    chosen: how many that it chooses.
    renormalized: whether their weights are made to sum up to 1.
    shared: how many that all rows take.
    weighted: whether a score says how much the shared ones count.
    sigmoid: whether weights are the sigmoids of scores, not their softmax.
    groups: of equally many neighbours.
    open_groups: how many of them a row chooses from.
    factor: on the weights of those that it chooses.
    """

    chosen: int
    renormalized: bool
    shared: int = 0
    weighted: bool = True
    sigmoid: bool = False
    groups: int = 1
    open_groups: int = 1
    factor: float = 1.0

    @property
    def taken(self) -> int:
        """Experts of each row."""
        return self.chosen + self.shared

    @property
    def other_scores(self) -> int:
        """How many scores stand behind those of the experts to choose from."""
        return int(self.shared > 0 and self.weighted)


@dataclass(frozen=True)
class Experts:
    """A feed-forward part of experts, whose matrices lie one below the other.

    router: [experts to choose from, size], and a row more if a score weighs shared experts.
    gate_up: [experts * 2 * inner, size], of each expert its gates, then its values.
    down: [experts * size, inner].
    router_bias, gate_up_bias, down_bias: a number for each of their rows.
    activation: of the gates.
    correction: float32 [experts to choose from], of sigmoids.
    """

    router: Tensor
    gate_up: Matrix
    down: Matrix
    routing: Routing
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = Activation.SILU
    correction: Tensor | None = None

    @property
    def choices(self) -> int:
        """Experts that a row chooses from."""
        return len(self.router) - self.routing.other_scores

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
