import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagefleet_worker.model.config import parse_config
from pagefleet_worker.model.family import HfConfig, QkNorm
from pagefleet_worker.model_files import ModelError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}


DEEPSEEK_V2 = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}


def test_silent_fields_have_transformers_defaults() -> None:
    config = parse_config(LLAMA)
    assert (config.kv_heads, config.head_dim, config.ropes[0].rope_theta) == (4, 16, 10000.0)
    assert config.windows == (0, 0)
    switches = (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert switches == (False, False, False, QkNorm.NONE)
    assert (config.tied_embeddings, config.dtype) == (False, None)


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "attention_bias": True},
    "gemma": {"hidden_act": "gelu"},
    "gemma2": {},
    "gemma3_text": {
        "rope_theta": 2e6,
        "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    },
    "phi3": {
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 6,
            "long_factor": [2.0] * 6,
        },
    },
    "olmo2": {"rope_theta": 5e5},
    "olmo3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
        },
    },
    "smollm3": {"use_sliding_window": True, "sliding_window": 24},
    "granite": {"embedding_multiplier": 12.0, "rope_theta": 1e4},
    "glm": {"partial_rotary_factor": 0.75, "attention_bias": False},
    "glm4": {"partial_rotary_factor": 0.5, "rope_theta": 1e6},
    "seed_oss": {"attention_bias": False, "attention_out_bias": True, "rope_theta": 1e7},
    "exaone4": {
        "sliding_window": 64,
        "sliding_window_pattern": 3,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "ernie4_5": {"use_bias": True, "head_dim": 32, "tie_word_embeddings": False},
    "glm4_moe": {
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "n_routed_experts": 16,
        "first_k_dense_replace": 3,
    },
    "olmoe": {"num_experts": 16, "norm_topk_prob": True},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}
"""Fields as configs had them before transformers 5, with few beside what must be there."""


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("silent", [True, False])
def test_configs_mean_what_they_mean_to_transformers(name: str, silent: bool) -> None:
    """`to_dict` spells out all defaults, and ropes and windows in the terms of today."""
    values = LLAMA | {"model_type": name, "num_hidden_layers": 8, "num_key_value_heads": 2}
    if not silent:
        values |= PUBLISHED[name]
    theirs = AutoConfig.for_model(**json.loads(json.dumps(values))).to_dict()
    own, spelled_out = parse_config(values), parse_config(json.loads(json.dumps(theirs)))
    assert replace(own, dtype=None) == replace(spelled_out, dtype=None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported; these are: llama"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"is_causal": False}, "only causal attention is served"),
        ({"use_bidirectional_attention": True}, "only causal attention is served"),
        (
            {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 2},
            "Layers of chunked_attention are not supported",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "has 2 layers, and layer_types names 1",
        ),
        (
            {"model_type": "mixtral", "hidden_act": "gelu_pytorch_tanh"},
            "activation 'gelu_pytorch_tanh' is not",
        ),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "activation 'relu' is not"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope variant 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "malformed: .*`factor`"),
        (
            {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
            "Without layer_types a sliding_window_pattern of 'LLLG' does not say",
        ),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, r"clipped \(clip_qkv\) are not supported"),
        ({"partial_rotary_factor": 0.5}, "part of each head is not supported"),
        (
            {
                "model_type": "phi3",
                "partial_rotary_factor": 0.75,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 6,
                    "long_factor": [1.0] * 8,
                },
            },
            "Longrope has 6 or 8 factors, and 6 pairs turn",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1]},
            "has 2 layers, and no_rope_layers names 1",
        ),
        (
            {"model_type": "gpt_oss", "num_key_value_heads": 2, "swiglu_limit": 5.0},
            "swiglu_limit of 5.0 and a .* 1.702 are not",
        ),
        ({**DEEPSEEK_V2, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc' are not supported"),
        (
            {**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 1},
            "cannot take 6 of 64 experts from 1 of 7 groups",
        ),
        (
            {**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 32, "topk_group": 2},
            "cannot take 6 of 64 experts from 2 of 32 groups",
        ),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob with the topk_method 'greedy'"),
        ({"model_type": "deepseek_v3", "n_group": 256}, "256 experts from 4 of 256 groups"),
        ({"model_type": "deepseek_v3", "attention_bias": True}, "Latents with biases"),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 63}, "heads have 63 dimensions"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"num_attention_heads": 0}, r"malformed: .*>= 1.*\$.num_attention_heads"),
        ({"hidden_size": 60}, "heads have 15 dimensions"),
        ({"rope_parameters": [1]}, r"parameters of its rope are \[1\]"),
        ({"vocab_size": "many"}, r"malformed: .*\$.vocab_size"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        parse_config(LLAMA | change)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_wrong_is_refused_or_read(name: str) -> None:
    """Whatever a field holds, nothing else is raised."""
    said = {"model_type": name, "num_key_value_heads": 2, "num_hidden_layers": 8}
    published = LLAMA | PUBLISHED[name] | said
    values, refused = AutoConfig.for_model(**published).to_dict(), 0
    wrong = [0, -1, 1, 3, 0.5, True, "x", None, [], [0], ["x"], {}, {"a": 1}, {"rope_type": "yarn"}]
    values.pop("layer_types", None)  # they follow from other fields then
    if isinstance(values.get("sliding_window_pattern"), str):  # which says nothing by itself
        values["sliding_window_pattern"] = 4
    parse_config(values)
    for field in values.keys() | HfConfig.__struct_fields__:
        for value in [*wrong, {"full_attention": 1, "sliding_attention": 1}]:
            try:
                parse_config(values | {field: value})
            except ModelError:
                refused += 1
    assert refused > 50


def test_windows() -> None:
    window = {"sliding_window": 8, "num_hidden_layers": 3}
    assert parse_config(LLAMA | window).windows == (0, 0, 0)
    assert parse_config(LLAMA | window | {"model_type": "mistral"}).windows == (8, 8, 8)
    qwen = LLAMA | window | {"model_type": "qwen3"}
    assert parse_config(qwen).windows == (0, 0, 0)
    qwen |= {"use_sliding_window": True}
    assert parse_config(qwen | {"max_window_layers": 2}).windows == (0, 0, 8)
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse_config(qwen | {"layer_types": layers}).windows == (8, 0, 8)


def split_rope(rope_type: str, rope_theta: float, **rest: Any) -> tuple[str, float, dict[str, Any]]:
    return rope_type, rope_theta, rest


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-llama3", "llama-yarn"])
def test_old_and_new_rope_keys_mean_the_same(name: str, small_model: Callable[[str], Path]) -> None:
    new = json.loads((small_model(name) / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    kind, theta, rest = split_rope(**new["rope_parameters"])
    old |= {"rope_theta": theta, "rope_scaling": {"type": kind, **rest} if rest else None}
    assert parse_config(old) == parse_config(new)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0,
         "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    ],
)  # fmt: skip
def test_rope_is_transformers(parameters: dict[str, Any]) -> None:
    values = LLAMA | {"rope_parameters": {"rope_theta": 5e5, **parameters}}
    oracle = AutoConfig.for_model(**json.loads(json.dumps(values)))
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](oracle)
    rope = parse_config(values).ropes[0]
    assert torch.equal(rope.frequencies(16), frequencies)
    assert rope.amplitude == amplitude
    angles = torch.outer(torch.arange(100.0), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * amplitude
    assert torch.equal(rope.table(16, 100), table)
