"""SentencePiece tokenizers of GGUF files, against SentencePiece's rule word for word."""

import random
import re
from itertools import pairwise
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import Tokenizer

from pagefleet_worker.model_files import ModelError
from pagefleet_worker.preparation.gguf_tokenizer import gguf_tokenizer
from pagefleet_worker.preparation.gguf_vocabulary import gguf_vocabulary

SPACE = "\u2581"
WHOLE = ["\n\n", "\n\n\n", "  ", "   ", "<tool>", "<eos>", "<unk>"]
"""Tokens that are taken out of a text before anything is merged."""
ALPHABET = [*"abcdet ", "  ", "é", "中", "\n", "\n\n", "x", "😀", "<tool>", "<tool", "<eos>", SPACE]


def metadata_of(rng: random.Random, **changes: Any) -> dict[str, Any]:
    """Random pieces, each of two others, by score; bytes; and tokens to be taken whole."""
    pieces = [*"abcdet", SPACE, "é", "中"]
    while len(pieces) < 60:
        made = "".join(rng.choices(pieces, k=2))
        if made not in pieces and len(made) < 9:
            pieces.append(made)
    scores = {piece: -float(rank) for rank, piece in enumerate(pieces[9:])}
    rng.shuffle(pieces)
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    kinds = [
        *[(token, TokenType.CONTROL) for token in ("<pad>", "<eos>", "<bos>")],
        ("<unk>", TokenType.UNKNOWN),
        *[(token, TokenType.USER_DEFINED) for token in WHOLE if token not in ("<eos>", "<unk>")],
        *[(token, TokenType.BYTE) for token in octets],
        *[(token, TokenType.NORMAL) for token in pieces],
    ]
    tokens, types = zip(*kinds, strict=True)
    values = {
        "model": "llama",
        "tokens": list(tokens),
        "token_type": list(types),
        "scores": [scores.get(token, -1000.0) for token in tokens],
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": v for key, v in (values | changes).items()}


def tokenizer_of(metadata: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    return gguf_tokenizer(gguf_vocabulary(metadata), architecture)


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: of all neighbours the first with the best score."""
    parts = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (scores[left + right], -at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    found: list[str] = []
    for part in parts:
        octets = [f"<0x{octet:02X}>" for octet in part.encode()]
        found += [part] if part in scores else octets
    return found


def normal_scores(metadata: dict[str, Any]) -> dict[str, float]:
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    return {t: score for t, score, kind in zip(*columns, strict=True) if kind == TokenType.NORMAL}


def parted(text: str) -> list[str]:
    """Tokens that are taken whole, the longest first, and the texts between them."""
    longest_first = "|".join(map(re.escape, sorted(WHOLE, key=len, reverse=True)))
    return [part for part in re.split(f"({longest_first})", text) if part]


@pytest.mark.parametrize("prefix", [False, True, None])  # None: llama.cpp then puts one
def test_the_merges_are_those_of_its_rule(prefix):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    metadata = metadata_of(rng, add_space_prefix=prefix)
    scores = normal_scores(metadata)
    space = "" if prefix is False else SPACE
    tokenizer = tokenizer_of(metadata)
    for _ in range(300):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(0, 30)))
        expected = ["<bos>"]
        for part in parted(text):
            expected += [part] if part in WHOLE else merged_by_score(space + part, scores)
        assert tokenizer.encode(text).tokens == expected


@pytest.mark.parametrize("prefix", [False, True])
def test_a_text_comes_back(prefix):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    tokenizer = tokenizer_of(metadata_of(rng, add_space_prefix=prefix))
    for _ in range(100):
        text = "".join(rng.choices([" a", " ", *"bcdetx", "é", "😀", "\n"], k=rng.randint(0, 20)))
        text = next((part for part in parted(text) if part not in WHOLE), "")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("architecture", "behind"), [("phi3", ["b", "b", " \tb"]), ("llama", [" \tb", "\nb", " \tb"])]
)
def test_tokens_of_phi3_take_the_white_space_behind_them(architecture, behind):
    metadata = metadata_of(random.Random(0))
    tokenizer = tokenizer_of(metadata, architecture)
    found = tokenizer.encode("<eos> \tb<tool>\nb<unk> \tb").ids
    expected = ["<bos>"]
    for token, text in zip(["<eos>", "<tool>", "<unk>"], behind, strict=True):
        expected += [token, *merged_by_score(SPACE + text, normal_scores(metadata))]
    assert list(map(tokenizer.id_to_token, found)) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remove_extra_whitespaces": True}, "changes texts before"),
        ({"precompiled_charsmap": [1, 2]}, "changes texts before"),
        ({"scores": []}, "lacks scores"),
        ({"token_type": []}, "lacks scores, or tokens for single bytes"),
        ({"model": "t5"}, "tokenizer model 't5' is not supported"),
    ],
)
def test_what_would_give_other_tokens_is_refused(changes, reason):
    with pytest.raises(ModelError, match=f"{reason}.*with --tokenizer"):
        tokenizer_of(metadata_of(random.Random(0), **changes))


def test_scores_that_are_placeholders_are_refused():
    metadata = metadata_of(random.Random(0))
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(ModelError, match=r"all the same.*with --tokenizer"):
        tokenizer_of(metadata)


def test_bytes_without_tokens_are_refused():
    metadata = metadata_of(random.Random(0))
    types = metadata["tokenizer.ggml.token_type"]
    types[types.index(TokenType.BYTE)] = TokenType.UNUSED
    with pytest.raises(ModelError, match="lacks scores, or tokens for single bytes"):
        tokenizer_of(metadata)
