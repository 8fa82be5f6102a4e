"""A `tokenizers` tokenizer out of a GGUF file's metadata.

`tokenizer.ggml.model` names the algorithm and `tokenizer.ggml.pre` how text is cut before it. The
name stands for a fixed rule in llama.cpp, not for data in the file, so each known name has its rule
here, as the model's authors published it in their tokenizer.json; an unknown name is refused,
because a guess would give wrong ids without a word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from pagefleet_worker.model_files import ModelError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type` (the GGUF specification, after SentencePiece's types)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """The cut of Llama 3's and Qwen2's tokenizer.json, which differ in how they take digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


@dataclass(frozen=True)
class _Rule:
    """How one `tokenizer.ggml.pre` treats text before the merges."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_INSTEAD = "Name the model's tokenizer.json, or a folder that holds it, with --tokenizer."

_RULES = {
    "gpt-2": _Rule(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)),
    "smollm": _Rule(_single_digits),
    "llama-bpe": _Rule(lambda: _words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": _Rule(lambda: _words(r"\p{N}"), normalizer=normalizers.NFC),
}


def gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata; a ModelError names what in it is unknown."""
    algorithm = metadata.get("tokenizer.ggml.model")
    if algorithm not in _ALGORITHMS:
        raise ModelError(
            f"The GGUF tokenizer model {algorithm!r} is not supported; these are: "
            f"{', '.join(map(repr, _ALGORITHMS))}. {_INSTEAD}"
        )
    tokenizer, usual = _ALGORITHMS[algorithm](metadata)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    ends = {"bos": usual, "eos": False}
    added = {
        end: metadata[f"tokenizer.ggml.{end}_token_id"]
        for end, usual in ends.items()
        if metadata.get(f"tokenizer.ggml.add_{end}_token", usual)
    }
    if added:
        _enclose(tokenizer, {end: (tokens[token_id], token_id) for end, token_id in added.items()})
    return tokenizer


def _byte_level(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether texts usually begin with a token of their own."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _RULES:
        raise ModelError(
            f"The GGUF pre-tokenizer {name!r} is not known (known: {', '.join(_RULES)}), and a "
            f"guess would give wrong tokens. {_INSTEAD}"
        )
    rule = _RULES[name]
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=_numbered(tokens), merges=merges, ignore_merges=rule.ignore_merges)
    )
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentencepiece(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE (Kudo and Richardson, 2018), as of Gemma: of neighbours those are merged
    first whose piece has the highest score, and what is no piece becomes bytes.

    Where it puts a space before texts, tools differ in what a text is beside special tokens.
    """
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise ModelError(
            "The GGUF file's SentencePiece tokenizer puts a space before texts, which tools do in "
            f"different places, and a guess would give wrong tokens. {_INSTEAD}"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores, types = (metadata[f"tokenizer.ggml.{kind}"] for kind in ("scores", "token_type"))
    if types.count(TokenType.BYTE) != 256:
        raise ModelError(f"The GGUF file's tokenizer lacks tokens for single bytes. {_INSTEAD}")
    pieces = {
        token: (-score, number)
        for number, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True))
        if kind == TokenType.NORMAL
    }
    halves = [
        (order, token[:cut], token[cut:])
        for token, order in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    merges = [(left, right) for _, left, right in sorted(halves, key=lambda each: each[0])]
    tokenizer = Tokenizer(models.BPE(vocab=_numbered(tokens), merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, True


_ALGORITHMS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By `tokenizer.ggml.model`."""


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Make control tokens special and user-defined ones matched whole, both before all else."""
    for token, kind in zip(tokens, types, strict=False):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = kind == TokenType.CONTROL
            added = AddedToken(token, special=special, normalized=False)
            tokenizer.add_special_tokens([added]) if special else tokenizer.add_tokens([added])


def _enclose(tokenizer: Tokenizer, added: dict[str, tuple[str, int]]) -> None:
    """Have texts begin with the token `bos`, and end with `eos`, as those of models for embeddings
    do.
    """
    before, after = ([added[end][0]] if end in added else [] for end in ("bos", "eos"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=list(added.values()),
    )
