"""GGUF files written here, and the default model, against what transformers makes of them."""

import random
from pathlib import Path

import numpy as np
import pytest
import regex
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from pagefleet.byte_alphabet import CHARACTER_OF_BYTE
from pagefleet.manifest import Manifest
from pagefleet_kernels.experts import Routing
from pagefleet_kernels.layers import Activation
from pagefleet_worker.checkpoints.gguf_file import read_gguf
from pagefleet_worker.model.config import parse_config
from pagefleet_worker.model.rope import LongRope
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.preparation.gguf_config import gguf_config
from pagefleet_worker.preparation.gguf_model import gguf_model
from pagefleet_worker.prepare import prepare

MERGES = ["h e", "l l", "Ġ t", "Ġt he", "1 2", "12 3", "Ã ©", "' s", "Ċ Ċ", "Ġ Ġ"]
SPECIAL = ["<s>", "</s>", "<|eot|>"]
TOKENS = [*CHARACTER_OF_BYTE, *(merge.replace(" ", "") for merge in MERGES), "<tool>", *SPECIAL]
TYPES = [TokenType.NORMAL] * (len(TOKENS) - 4) + [TokenType.USER_DEFINED] + [TokenType.CONTROL] * 3
FACTORS = {"short": 1.5, "long": 4.0}
BOS, EOS, EOT = (TOKENS.index(token) for token in SPECIAL)


def gguf_file(path: Path, architecture: str = "llama", pre: str = "smollm", **extra) -> Path:
    """A GGUF file of one small tensor; `extra` are tensors by name and metadata by key."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    if f"{architecture}__block_count" not in extra:
        writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(EOT)
    for key, value in extra.items():
        name = key.replace("__", ".")
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS) + 5, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "architecture",
    ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"],
)
def test_the_config_in_hugging_faces_terms(tmp_path, architecture):
    from transformers import AutoConfig

    path = gguf_file(
        tmp_path / "m.gguf", architecture, **{f"{architecture}__attention__key_length": 16}
    )
    config = gguf_model(path, "m").config
    loaded = AutoConfig.for_model(**config)
    assert loaded.model_type == {"gemma3": "gemma3_text"}.get(architecture, architecture)
    assert (loaded.hidden_size, loaded.intermediate_size, loaded.num_hidden_layers) == (32, 48, 2)
    assert (loaded.num_attention_heads, loaded.num_key_value_heads, loaded.head_dim) == (4, 2, 16)
    ropes = loaded.rope_parameters
    assert ropes.get("full_attention", ropes)["rope_theta"] == 500000.0
    assert loaded.rms_norm_eps == pytest.approx(1e-6)
    assert loaded.vocab_size == len(TOKENS) + 5
    assert loaded.tie_word_embeddings


def test_the_files_of_a_prepared_gguf_model(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", tokenizer__chat_template="{{ messages[0].content }}")
    folder = tmp_path / "prepared"
    folder.mkdir()
    gguf_model(path, "m").write(folder)
    manifest = Manifest.load(folder)
    assert manifest.eos_token_ids == (EOS, EOT)
    assert (manifest.bos_token, manifest.eos_token) == ("<s>", "</s>")
    assert manifest.weights.paths == (str(path),)
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize(("pooling", "embeds"), [(0, True), (1, False), (3, True), (4, False)])
def test_how_it_pools_is_seen(tmp_path, pooling, embeds):
    assert gguf_model(gguf_file(tmp_path / "n.gguf", "qwen3"), "n").embeds
    path = gguf_file(tmp_path / "m.gguf", "qwen3", qwen3__pooling_type=pooling)
    assert gguf_model(path, "m").embeds == embeds


def test_output_weights_and_biases_are_seen(tmp_path):
    tensors = {"output__weight": np.zeros((4, 32), np.float32)}
    tensors["blk__0__attn_q__bias"] = np.zeros(32, np.float32)
    config = gguf_model(gguf_file(tmp_path / "m.gguf", **tensors), "m").config
    assert (config["tie_word_embeddings"], config["attention_bias"]) == (False, True)


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"),
    [
        ("gemma2", 26, 16**-0.5),
        ("gemma2", 46, 8**-0.5),
        ("gemma3", 62, 8**-0.5),
        ("gemma3", 34, 16**-0.5),
        ("llama", 46, 16**-0.5),
    ],
)
def test_what_scales_the_scores_of_gemma(tmp_path, architecture, layers, scale):
    own = {f"{architecture}__attention__key_length": 16, f"{architecture}__block_count": layers}
    if architecture != "llama":
        own |= {f"{architecture}__attention__sliding_window": 24}
    config = parse_config(
        gguf_model(gguf_file(tmp_path / "m.gguf", architecture, **own), "m").config
    )
    assert config.scale == scale
    assert config.windows.count(24) == {46: 23, 26: 13, 62: 52, 34: 29}[layers] * (
        architecture != "llama"
    )
    assert config.activation is (
        Activation.SILU if architecture == "llama" else Activation.GELU_TANH
    )


def test_soft_caps_are_kept(tmp_path):
    caps = {"gemma2__attn_logit_softcapping": 40.0, "gemma2__final_logit_softcapping": 20.0}
    values = gguf_model(gguf_file(tmp_path / "m.gguf", "gemma2", **caps), "m").config
    config = parse_config(values)
    assert (config.softcap, config.logits_softcap) == (40.0, 20.0)


def test_longrope_of_a_part_of_each_head(tmp_path):
    factors = {name: np.linspace(1, end, 6).astype(np.float32) for name, end in FACTORS.items()}
    said = {
        "phi3__attention__key_length": 16,
        "phi3__rope__dimension_count": 12,
        "phi3__rope__scaling__original_context_length": 64,
        "phi3__rope__scaling__attn_factor": 1.2,
        **{f"rope_factors_{name}__weight": each for name, each in factors.items()},
    }
    config = parse_config(gguf_model(gguf_file(tmp_path / "m.gguf", "phi3", **said), "m").config)
    rope = config.ropes[1]
    assert isinstance(rope, LongRope)
    assert (rope.turned(16), rope.original_max_position_embeddings) == (12, 64)
    assert rope.amplitude == pytest.approx(1.2)
    assert rope.long_factor == pytest.approx(factors["long"].tolist())
    assert rope.short_factor == pytest.approx(factors["short"].tolist())
    assert config.fused


def test_a_tokenizer_of_another_kind_is_replaced(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", "gemma2", pre="default")
    with pytest.raises(ModelError, match="with --tokenizer"):
        prepare(str(path), tmp_path)
    gguf_model(gguf_file(tmp_path / "other.gguf"), "m").tokenizer.save(str(tmp_path / "t.json"))
    folder = prepare(str(path), tmp_path, tokenizer=str(tmp_path / "t.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["he", "ll", "o"]


YARN = {
    "llama__rope__scaling__type": "yarn",
    "llama__rope__scaling__factor": 4.0,
    "llama__rope__scaling__original_context_length": 64,
    "llama__rope__scaling__attn_factor": 1.0,
    "llama__rope__scaling__yarn_attn_factor": 1.25,
}


def test_yarn_scaling_is_kept(tmp_path):
    config = gguf_model(gguf_file(tmp_path / "m.gguf", **YARN), "m").config
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config["rope_scaling"] == expected | {"attention_factor": 1.25}


def test_a_factor_alone_is_linear_scaling(tmp_path):
    """As llama.cpp reads it; by its type a file may ask for none in spite of a factor."""
    scaling = {"llama__rope__scaling__factor": 4.0}
    config = gguf_model(gguf_file(tmp_path / "m.gguf", **scaling), "m").config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    scaling["llama__rope__scaling__type"] = "none"
    assert "rope_scaling" not in gguf_model(gguf_file(tmp_path / "n.gguf", **scaling), "n").config


def test_olmo3_is_an_olmo2_with_windows(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", "olmo2", olmo2__attention__sliding_window=24)
    config = parse_config(gguf_model(path, "m").config)
    assert (config.architecture, config.windows) == ("olmo3", (24, 24))
    assert [rope.rope_theta for rope in config.ropes] == [500000.0] * 2
    path = gguf_file(tmp_path / "n.gguf", "olmo2")
    assert parse_config(gguf_model(path, "n").config).architecture == "olmo2"


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs = LlamaConfig(
        head_dim=64,
        rope_parameters={"rope_theta": 500000.0, **scaling},
        max_position_embeddings=1 << 17,
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = (plain / frequencies.numpy()).astype(np.float32)
    tensors = {"rope_freqs__weight": factors, "llama__attention__key_length": 64}
    path = gguf_file(tmp_path / "m.gguf", **tensors)
    assert gguf_model(path, "m").config["rope_scaling"] == pytest.approx(scaling)

    other = gguf_file(tmp_path / "o.gguf", **tensors | {"rope_freqs__weight": factors**2})
    with pytest.raises(ModelError, match="not Llama 3's frequency scaling"):
        gguf_model(other, "o")


GLM_4_MOE = {
    "architecture": "glm4moe",
    "glm4moe__block_count": 4,
    "glm4moe__nextn_predict_layers": 1,
    "glm4moe__expert_count": 6,
    "glm4moe__expert_used_count": 3,
    "glm4moe__expert_feed_forward_length": 16,
    "glm4moe__expert_shared_count": 2,
    "glm4moe__expert_weights_scale": 2.5,
    "glm4moe__expert_gating_func": 2,
    "glm4moe__leading_dense_block_count": 1,
    "glm4moe__rope__dimension_count": 4,
}


def test_layers_that_draft_are_left_out(tmp_path):
    """As GLM-4.5's files have one behind the others; the experts are those that the keys say."""
    config = parse_config(gguf_model(gguf_file(tmp_path / "m.gguf", **GLM_4_MOE), "m").config)
    assert config.layers == 3
    dense, *shapes = config.experts
    assert dense is None
    routings = {each.routing for each in shapes if each is not None}
    routing = Routing(3, renormalized=True, shared=2, weighted=False, sigmoid=True, factor=2.5)
    assert routings == {routing}
    assert [(each.count, each.inner_size) for each in shapes if each is not None] == [(6, 16)] * 2
    assert config.ropes[0].turned(8) == 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"pre": "default"}, "pre-tokenizer 'default' is not known"),
        ({"llama__attention__causal": False}, "only causal attention is served"),
        (
            {"architecture": "qwen3", "blk__0__attn_output__bias": np.zeros(32, np.float32)},
            r"biases \(attn_output.bias\), as no qwen3 model has",
        ),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ({**YARN, "llama__rope__scaling__attn_factor": 1.5}, "rope scaling 'yarn'"),
        ({**YARN, "llama__rope__scaling__yarn_log_multiplier": 0.1}, "rope scaling 'yarn'"),
        (
            {"architecture": "granite", "granite__rope__scaling__finetuned": False},
            "Granite without rotary embedding",
        ),
        (
            {"architecture": "glm4", "glm4__rope__dimension_sections": 8},
            "text model of one that sees",
        ),
        (
            {**GLM_4_MOE, "glm4moe__expert_gating_func": 1},
            "glm4_moe are not chosen as its file says",
        ),
    ],
)
def test_what_cannot_be_served_is_said(tmp_path, options, reason):
    with pytest.raises(ModelError, match=reason):
        gguf_model(gguf_file(tmp_path / "m.gguf", **options), "m")


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3", "granite", "olmo2", "qwen2moe", "glm4moe"]
)
def test_metadata_is_refused_or_read(tmp_path, architecture):
    """Whatever a key holds, and whichever is not there, nothing else is raised."""
    own = {
        "attention__key_length": 16,
        "attention__sliding_window": 24,
        "attention__sliding_window_pattern": 2,
        "attention__scale": 0.5,
        "expert_count": 4,
        "expert_used_count": 2,
        "rope__dimension_count": 16,
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 2.0,
        "rope__scaling__original_context_length": 64,
    }
    extra = {f"{architecture}__{key}": value for key, value in own.items()}
    file = read_gguf(gguf_file(tmp_path / "m.gguf", architecture, **extra))
    assert gguf_config(file.metadata, file.tensors)["num_attention_heads"] == 4
    refused, keys = 0, [key for key in file.metadata if not key.startswith("tokenizer")]
    for key in keys:
        others = {other: value for other, value in file.metadata.items() if other != key}
        wrong = [0, -1, 7, 0.5, "x", [], [1, 2], ["x"]]
        for metadata in [others, *(others | {key: value} for value in wrong)]:
            try:
                gguf_config(metadata, file.tensors)
            except ModelError:
                refused += 1
    assert refused > 50
    with pytest.raises(ModelError, match="lacks the tensor 'token_embd"):
        gguf_config(file.metadata, {})


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="is no GGUF file"):
        gguf_model(path, "m")


def random_texts(count: int = 200) -> list[str]:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    parts = ["the", " the", "hello", "1", "123", "1234", "'s", "'S", "é", "e\u0301", "中", "😀"]
    parts += ["\n", " ", "  ", "\t", "\r\n", "!?", "<tool>", "</s>", "</s", "½", "\u00a0", "_"]
    parts += ["iPhone", "HTTPServer", "I'LL", "//", "ǅ", "ʰ", "\u0301"]
    return ["".join(rng.choices(parts, k=12)) for _ in range(count)]


def test_qwen2s_cut_is_transformers(tmp_path):
    from transformers import Qwen2Tokenizer

    ours = gguf_model(gguf_file(tmp_path / "m.gguf", "qwen2", "qwen2"), "m").tokenizer
    theirs = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(TOKENS)},
        merges=[tuple(merge.split(" ")) for merge in MERGES],
        extra_special_tokens=SPECIAL,
    )
    theirs.add_tokens(["<tool>"])
    for text in random_texts():
        assert ours.encode(text).ids == theirs(text)["input_ids"]


def test_gpt2s_cut_is_transformers(tmp_path):
    from transformers import GPT2Tokenizer

    ours = gguf_model(gguf_file(tmp_path / "m.gguf", pre="gpt-2"), "m").tokenizer
    theirs = GPT2Tokenizer(
        vocab={token: i for i, token in enumerate(TOKENS)},
        merges=[tuple(merge.split(" ")) for merge in MERGES],
        extra_special_tokens=SPECIAL,
        unk_token="<s>",
        bos_token="<s>",
        eos_token="</s>",
    )
    theirs.add_tokens(["<tool>"])
    for text in random_texts():
        assert ours.encode(text).ids == theirs(text)["input_ids"]


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("gpt-2", GPT_2),
        ("refact", GPT_2),
        ("smollm", GPT_2),
        ("llama-bpe", GPT_4),
        ("smaug-bpe", GPT_4),
        ("dbrx", GPT_4),
        ("gpt-4o", GPT_4O),
        ("qwen2", GPT_4.replace("{1,3}", "")),
    ],
)
def test_texts_are_cut_by_the_pattern_that_a_name_stands_for(tmp_path, pre, pattern):
    tokenizer = gguf_model(gguf_file(tmp_path / "m.gguf", pre=pre), "m").tokenizer
    letters = [CHARACTER_OF_BYTE[octet] for octet in range(256)]
    for text in random_texts():
        found = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        parts = regex.split(r"(\p{N})", text) if pre in ("refact", "smollm") else [text]
        expected = [each for part in parts for each in regex.findall(pattern, part)]
        assert found == ["".join(letters[octet] for octet in each.encode()) for each in expected]


def test_llama3s_cut_and_its_bos(tmp_path):
    tokenizer = gguf_model(gguf_file(tmp_path / "m.gguf", pre="llama-bpe"), "m").tokenizer
    assert tokenizer.encode("the 1234").tokens == ["<s>", "t", "he", "Ġ", "123", "4"]
    without = gguf_file(tmp_path / "n.gguf", pre="llama-bpe", tokenizer__ggml__add_bos_token=False)
    assert gguf_model(without, "n").tokenizer.encode("he").tokens == ["he"]


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", []), ("llama-bpe", ["<s>"])])
def test_the_end_that_a_model_for_embeddings_wants(tmp_path, pre, tokens):
    """As llama.cpp converts Qwen3-Embedding, whose tokenizer.json ends texts with a token."""
    path = gguf_file(tmp_path / "m.gguf", pre=pre, tokenizer__ggml__add_eos_token=True)
    tokenizer = gguf_model(path, "m").tokenizer
    assert tokenizer.encode("he").tokens == [*tokens, "he", "</s>"]
    assert tokenizer.encode("").tokens == [*tokens, "</s>"]
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_text_survives_the_tokenizer(tmp_path, pre):
    tokenizer = gguf_model(gguf_file(tmp_path / "m.gguf", pre=pre), "m").tokenizer
    for text in random_texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_smollm_takes_digits_one_by_one(tmp_path):
    tokenizer = gguf_model(gguf_file(tmp_path / "m.gguf"), "m").tokenizer
    assert tokenizer.encode("the 123").tokens == ["t", "he", "Ġ", "1", "2", "3"]


@pytest.mark.slow
def test_the_default_models_ids_are_transformers_but_for_digits(smollm2):
    """transformers knows no rule named smollm and takes GPT-2's, which cuts digits otherwise."""
    from transformers import AutoTokenizer

    weights = Path(Manifest.load(smollm2).weights.paths[0])
    theirs = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    ours = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in random_texts():
        plain = "".join(character for character in text if not character.isnumeric())
        assert ours.encode(plain).ids == theirs(plain)["input_ids"]


def test_the_default_model_takes_digits_one_by_one(smollm2):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("In 2024\t1").tokens == ["In", "Ġ", *"2024", "ĉ", "1"]
