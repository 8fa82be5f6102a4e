"""Random LoRA adapters in PEFT's format, and what a model is with one of them merged into it."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pagefleet_worker.prepare import prepare

ATTENTION = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),  # with latents
)
_FUSED = dict.fromkeys(ATTENTION[:3], "self_attn.qkv_proj")
_FUSED |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj")
"""What some models have in the place of several modules."""

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

KINDS: dict[str, dict[str, Any]] = {
    "all": {"parts": ATTENTION + MLP, "config": {"r": 8, "lora_alpha": 16}},
    "odd": {
        "parts": ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"),
        "config": {
            "r": 3,
            "lora_alpha": 4,
            "use_rslora": True,
            "rank_pattern": {"v_proj": 5, r"layers\.1\.mlp\.up_proj": 20},
            "alpha_pattern": {"self_attn.q_proj": 7},
        },
        "ranks": lambda layer, part: (
            5 if part.endswith(".v_proj") else 20 if (layer, part) == (1, MLP[1]) else 3
        ),
        "scale": lambda rank, part: (7 if part.endswith(".q_proj") else 4) / rank**0.5,
    },
    "few": {"parts": ("self_attn.o_proj",), "layers": 1, "config": {"r": 1, "lora_alpha": 2}},
}
"""What an adapter changes, its config, and the ranks and scales that this config means."""


def make_adapter(kind: str, model: Path, folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """Save a random adapter for the model in a folder of Hugging Face's layout.

    Returns:
        What it adds to the weights of the model, by their names.
    """
    what, config = KINDS[kind], AutoConfig.from_pretrained(model)
    alone = what["config"]
    ranks = what.get("ranks", lambda layer, part: alone["r"])
    scale = what.get("scale", lambda rank, part: alone["lora_alpha"] / rank)
    shapes = {
        name: weight.shape
        for name, weight in AutoModelForCausalLM.from_config(config).named_parameters()
    }
    parts = what["parts"]
    if "model.layers.0.self_attn.qkv_proj.weight" in shapes:
        parts = tuple(dict.fromkeys(_FUSED.get(part, part) for part in parts))
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for layer in range(what.get("layers", config.num_hidden_layers)):
        for part in parts:
            name, rank = f"model.layers.{layer}.{part}", ranks(layer, part)
            if f"{name}.weight" not in shapes:  # a layer with experts, or with latents, or without
                continue
            outputs, inputs = shapes[f"{name}.weight"]
            down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            up = torch.randn(outputs, rank, generator=generator) / rank**0.5 / scale(rank, part)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            added[f"{name}.weight"] = scale(rank, part) * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({part.split(".")[1] for part in parts})
    settings = {"peft_type": "LORA", "bias": "none", "target_modules": targets, **alone}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added


def merged(model: Path, added: dict[str, Tensor] | None = None) -> torch.nn.Module:
    """transformers' model in float32, with what an adapter adds to its weights."""
    oracle: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, change in (added or {}).items():
            oracle.get_parameter(name).add_(change)
    return oracle


def with_adapters(model: Path, cache: Path) -> tuple[Path, list[torch.nn.Module]]:
    """A prepared model with an adapter of each of `KINDS`; and the oracles, the base first."""
    seed = random.randrange(2**32)
    print(f"adapters of seed {seed}")
    folders = {kind: cache / kind for kind in KINDS}
    oracles = [merged(model)]
    oracles += [merged(model, make_adapter(kind, model, folders[kind], seed)) for kind in KINDS]
    adapters = {kind: str(folder) for kind, folder in folders.items()}
    return prepare(str(model), cache / "prepared", adapters=adapters), oracles
