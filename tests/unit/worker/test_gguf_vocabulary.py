"""Metadata of tokenizers in GGUF files that does not hold what it should."""

from typing import Any

import pytest
from gguf import TokenType
from tokenizers import Tokenizer

from pagefleet.byte_alphabet import CHARACTER_OF_BYTE
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.preparation.gguf_tokenizer import gguf_tokenizer
from pagefleet_worker.preparation.gguf_vocabulary import gguf_vocabulary

SPECIAL = ["<s>", "</s>", "<|eot|>"]
BYTES = [f"<0x{octet:02X}>" for octet in range(256)]
KINDS = [TokenType.NORMAL] * 257 + [TokenType.CONTROL] * 3
IDS = {"bos_token_id": 257, "eos_token_id": 258, "eot_token_id": 259, "add_eos_token": True}

METADATA: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*CHARACTER_OF_BYTE, "he", *SPECIAL],
        "token_type": KINDS,
        "merges": ["h e"],
        **IDS,
    },
    "llama": {
        "model": "llama",
        "tokens": [*BYTES, "h", *SPECIAL],
        "token_type": [TokenType.BYTE] * 256 + KINDS[256:],
        "scores": [0.0] * 260,
        **IDS,
    },
}


def tokenizer_of(values: dict[str, Any]) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return gguf_tokenizer(gguf_vocabulary(metadata), "llama")


@pytest.mark.parametrize("model", sorted(METADATA))
def test_what_is_wrong_is_refused_or_read(model):
    """Whatever a key holds, nothing else is raised."""
    assert tokenizer_of(METADATA[model]).encode("h").tokens[0] == "<s>"
    wrong = [1, -1, 260, True, 0.5, "x", "x y z", [], [1], ["x"], ["x y z"], [[]], None]
    refused = 0
    for key in METADATA[model]:
        for value in wrong:
            try:
                tokenizer_of(METADATA[model] | {key: value}).encode("he</s>")
            except ModelError:
                refused += 1
        without = {other: value for other, value in METADATA[model].items() if other != key}
        try:
            tokenizer_of(without).encode("he</s>")
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 5}, r"malformed: Expected `array`, got `int` - at `\$.tokenizer.ggml.tokens`"),
        ({"bos_token_id": 260}, "has 260 tokens, and token 260 as bos_token_id"),
        ({"bos_token_id": None}, "lacks bos_token_id"),
        ({"token_type": [1]}, "has 260 tokens and tokenizer.ggml.token_type for 1"),
        ({"merges": ["h e x"]}, "merges of .* are malformed: 'h e x'"),
        ({"merges": ["h x"]}, "merges of .* are malformed: 'h x'"),
        ({"add_space_prefix": True}, "puts a space before texts"),
    ],
)
def test_the_sentence_says_what(changes, reason):
    with pytest.raises(ModelError, match=reason):
        tokenizer_of(METADATA["gpt2"] | changes)


@pytest.mark.parametrize("kind", [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.CONTROL])
def test_what_ends_texts_and_turns_is_special_whatever_its_type(kind):
    """Else a message could say it, and an answer would show it."""
    types = [*METADATA["gpt2"]["token_type"][:257], kind, kind, kind]
    tokenizer = tokenizer_of(METADATA["gpt2"] | {"token_type": types})
    added = tokenizer.get_added_tokens_decoder()
    assert {number for number, token in added.items() if token.special} == {257, 258, 259}
    assert tokenizer.encode("h<|eot|>", add_special_tokens=False).tokens == ["h", "<|eot|>"]


@pytest.mark.parametrize("kind", [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.CONTROL])
def test_a_turn_ends_though_no_key_names_its_end(kind):
    """As in files of Phi-3, whose turns end with <|end|>, and texts with another token."""
    values = METADATA["gpt2"] | {"tokens": [*METADATA["gpt2"]["tokens"], "<|end|>", "<end>"]}
    values |= {"token_type": [*KINDS, kind, kind]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    assert gguf_vocabulary(metadata).ends_of_turns == (259, 260)
    assert tokenizer_of(values).get_added_tokens_decoder()[260].special
    del metadata["tokenizer.ggml.eot_token_id"]
    assert gguf_vocabulary(metadata).ends_of_turns == (260,)


def test_a_turn_of_harmony_goes_on_behind_a_message():
    """As in files of gpt-oss, whose turns have several, which end with <|end|>."""
    added = ["<|end|>", "<|return|>", "<|call|>"]
    values = METADATA["gpt2"] | {"tokens": [*METADATA["gpt2"]["tokens"], *added]}
    values |= {"token_type": [*KINDS, *[TokenType.CONTROL] * 3], "eot_token_id": None}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    assert gguf_vocabulary(metadata).ends_of_turns == (261, 262)
    assert tokenizer_of(values).get_added_tokens_decoder()[260].special
