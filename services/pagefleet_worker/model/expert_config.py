"""What a config says of experts, the feed-forward parts of which a token goes through some."""

from dataclasses import dataclass, replace

from pagefleet_kernels.experts import Routing
from pagefleet_worker.model_files import ModelError


@dataclass(frozen=True)
class ExpertShape:
    """A layer's experts: how many there are to choose from, how wide each is, who takes which."""

    count: int
    inner_size: int
    routing: Routing

    def narrowed(self, inner_size: int) -> "ExpertShape":
        """The same, each as wide as that."""
        return replace(self, inner_size=inner_size)


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """The fields of a config that say it, most under their names there.

    Layers whose number, counting from 1, is no multiple of `decoder_sparse_step` are dense, and so
    are `mlp_only_layers`, counting from 0, and those below `first_k_dense_replace`. One shared
    expert that is as wide as several others is that many; see `Routing` about `weighted_shared`,
    and `sigmoid`.
    """

    count: int
    num_experts_per_tok: int
    inner_size: int
    norm_topk_prob: bool
    shared_size: int
    weighted_shared: bool
    decoder_sparse_step: int
    mlp_only_layers: list[int]
    first_k_dense_replace: int
    sigmoid: bool
    n_group: int
    topk_group: int
    routed_scaling_factor: float

    def layers(self, count: int) -> tuple[ExpertShape | None, ...]:
        """The experts of each layer; None where it is dense.

        Raises:
            ModelError: a token cannot take so many, or the shared one is not as wide as several.
        """
        self._check_groups()
        if not 1 <= self.num_experts_per_tok <= self.count or self.decoder_sparse_step < 1:
            raise ModelError(
                f"A token cannot take {self.num_experts_per_tok} of {self.count} experts in every "
                f"{self.decoder_sparse_step}th layer: the config is malformed."
            )
        shared, rest = divmod(self.shared_size, self.inner_size)
        if rest:
            raise ModelError(
                f"A shared expert of {self.shared_size} inner neurons is not "
                f"supported: it is no multiple of the others' {self.inner_size}."
            )
        routing = Routing(
            self.num_experts_per_tok,
            self.norm_topk_prob,
            shared,
            weighted=self.weighted_shared,
            sigmoid=self.sigmoid,
            groups=self.n_group,
            open_groups=self.topk_group,
            factor=self.routed_scaling_factor,
        )
        shape = ExpertShape(self.count, self.inner_size, routing)
        return tuple(
            None
            if layer in self.mlp_only_layers
            or layer < self.first_k_dense_replace
            or (layer + 1) % self.decoder_sparse_step
            else shape
            for layer in range(count)
        )

    def _check_groups(self) -> None:
        size, rest = divmod(self.count, max(self.n_group, 1))
        least = 2 if self.sigmoid else 1
        open_groups = 1 <= self.topk_group <= self.n_group
        if (
            rest
            or size < least
            or not open_groups
            or (self.num_experts_per_tok > self.topk_group * size)
        ):
            raise ModelError(
                f"A token cannot take {self.num_experts_per_tok} of {self.count} experts from "
                f"{self.topk_group} of {self.n_group} groups: the config is malformed."
            )
