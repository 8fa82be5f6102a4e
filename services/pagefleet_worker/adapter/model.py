"""Any decoder-only model that transformers knows, over the paged pool.

Transformers computes everything but attention: for that it calls a function that is registered
under a name (`AttentionInterface`). Ours finds the step that is under way in a context variable, as
not every model hands unknown arguments on to its layers. The flat batch is one sequence of packed
rows, [1, P], whose positions are given and whose mask is nobody's: the block tables say who sees
whom. A model whose attention says anything that `Pages.attend` does not understand is refused.

Only sampled tokens get logits, yet what comes after the last layer (soft caps, scales, projections)
is the model's own code. So a `Seam` is put between the two: it runs the layers alone, and later
hands some of the rows that came of them to the head alone.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from pagefleet_kernels.dispatch import Kernels
from pagefleet_worker.adapter.experts import EXPERTS
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.paging.batch import Batch, pad_rows
from pagefleet_worker.paging.causal_model import ModelShape

ATTENTION = "pagefleet"
"""The name of our attention in transformers."""

_OF_NO_EFFECT = frozenset({"dropout", "position_ids", "use_cache"})
"""Arguments that are about training, the cache of transformers, or what is already in the keys."""


@dataclass(frozen=True)
class Pages:
    """A step as its layers see it; `windows` grows by one with every layer that attends."""

    batch: Batch
    pool: Tensor
    kernels: Kernels
    progress: Callable[[], None]
    windows: list[int] = field(default_factory=list)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store the next layer's keys and values, then attend over all that its rows have stored.

        Args:
            query: [P, H, D].
            key: [P, G, D].
            value: [P, G, D].
            scale: see `reference.attention`, as for `window`, `softcap` and `sinks`.
            window: 0 means all.
            softcap: 0 means off.

        Returns:
            [P, H, D]; zero where tokens only pad.
        """
        batch, tokens, layer = self.batch, len(self.batch.slots), len(self.windows)
        if layer == len(self.pool):
            raise ModelError(f"it attends more often than once in each of its {layer} layers.")
        keys, values = self.pool[layer]
        groups, head_dim = keys.shape[1], keys.shape[3]
        for heads in (key, value):
            if heads.shape[1:] != (groups, head_dim):
                raise ModelError(
                    f"layer {layer} has {heads.shape[1]} key/value heads of {heads.shape[2]}, not "
                    f"{groups} of {head_dim}: all heads must be alike, as the config says them."
                )
        self.windows.append(window)
        self.kernels.write_kv(
            key[:tokens].contiguous(), value[:tokens].contiguous(), keys, values, batch.slots
        )
        attended = self.kernels.attention(
            query[:tokens].contiguous(), keys, values, batch.tables, batch.starts, batch.offsets,
            scale=scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        self.progress()
        return pad_rows(attended)


_pages: ContextVar[Pages] = ContextVar("pages")
"""Those of the step that is under way."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, H, P, D], key and value [1, G, P, D]; [1, P, H, D]."""
    unknown = {name for name, given in others.items() if given is not None} - _OF_NO_EFFECT
    if unknown:
        raise ModelError(f"its attention asks for {', '.join(sorted(unknown))}, unknown here.")
    if attention_mask is not None:
        raise ModelError("its attention has a mask of its own, which paged attention cannot apply.")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError("its attention looks ahead, so it is no decoder-only model.")
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    attended = _pages.get().attend(
        query,
        key,
        value,
        scale=query.shape[2] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return attended[None], None


AttentionInterface.register(ATTENTION, _attention)


class Seam(torch.nn.Module):
    """Stands where a model's layers were: runs them alone, or lets the head run alone."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self._output: type[Any] = BaseModelOutputWithPast

    @classmethod
    def within(cls, model: PreTrainedModel) -> "Seam":
        """Put a seam into `model`."""
        layers = model.get_decoder()
        (name,) = [name for name, module in model.named_modules() if module is layers]
        seam = cls(layers)
        model.set_submodule(name, seam)
        return seam

    def hidden(self, **inputs: Any) -> Tensor:
        """Run the layers; returns [1, P, hidden size]."""
        output = self.layers(**inputs)
        self._output = type(output)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def forward(self, *_: Any, inputs_embeds: Tensor, **others: Any) -> Any:
        """What the head believes to be the layers' output: `inputs_embeds`, as it is."""
        return self._output(last_hidden_state=inputs_embeds)


class AdaptedModel:
    """See `causal_model.CausalModel`; `model` is changed for good.

    Raises, beside what torch and transformers do, `ModelError` with the reason why it cannot be
    served right, to be read after a colon.
    """

    def __init__(
        self,
        config: ModelShape,
        model: PreTrainedModel,
        kernels: Kernels,
        progress: Callable[[], None],
    ) -> None:
        self.config = config
        self.kernels = kernels
        self._progress = progress
        self.dtype: torch.dtype = model.dtype
        self.kv_dtype: torch.dtype = model.dtype
        self.adapters = 0
        self.device: torch.device = model.device
        self._model = model
        model.set_attn_implementation(ATTENTION)
        if self.device.type == "cpu":
            model.set_experts_implementation(EXPERTS)
        self._seam = Seam.within(model)

    def hidden(self, batch: Batch, pool: Tensor) -> Tensor:
        """See `CausalModel`."""
        pages = Pages(batch, pool, self.kernels, self._progress)
        token = _pages.set(pages)
        try:
            hidden = self._seam.hidden(
                input_ids=batch.ids[None],
                position_ids=pad_rows(batch.positions)[None],
                use_cache=False,
            )
        finally:
            _pages.reset(token)
        self._check_calls(pages.windows)
        return hidden[0]

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """See `CausalModel`."""
        chosen = hidden[pad_rows(rows)]
        scores: Tensor = self._model(inputs_embeds=chosen[None], use_cache=False).logits
        return scores[0, : len(rows)].float()

    def _check_calls(self, windows: list[int]) -> None:
        expected = list(self.config.windows)
        if len(windows) < len(expected):
            raise ModelError(
                f"it attends {len(windows)} times through transformers' attention interface, not "
                f"once in each of its {len(expected)} layers: what it does instead is not paged."
            )
        if windows != expected:
            raise ModelError(
                f"its layers attend over the windows {windows}, but the config says {expected}."
            )
