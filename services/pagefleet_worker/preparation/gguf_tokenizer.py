"""A `tokenizers` tokenizer out of a GGUF file's metadata.

`tokenizer.ggml.model` names the algorithm and `tokenizer.ggml.pre` how text is cut before it. The
name stands for a fixed rule in llama.cpp, not for data in the file, so each known name has its rule
here, as the model's authors published it in their tokenizer.json; an unknown name is refused,
because a guess would give wrong ids without a word.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
from pagefleet_worker.preparation.gguf_sentencepiece import sentencepiece_bpe
from pagefleet_worker.preparation.gguf_vocabulary import INSTEAD, GgufVocabulary, TokenType

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """The cut of GPT-4, which Llama 3 and Qwen2 took over; they differ in how they take digits."""
    return _split(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_words() -> pre_tokenizers.PreTokenizer:
    """The cut of GPT-4o, which Phi-4-mini has: a word ends before a capital letter too."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"\p{Lu}\p{Lt}", r"\p{Ll}"
    upper, lower = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in (upper, lower))
    return _split(
        rf"{before}{upper}*{lower}+{_CONTRACTION}?|{before}{upper}+{lower}*{_CONTRACTION}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
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


_RULES = {
    "gpt-2": _Rule(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)),
    "smollm": _Rule(_single_digits),
    "refact": _Rule(_single_digits),
    "llama-bpe": _Rule(lambda: _words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "smaug-bpe": _Rule(lambda: _words(r"\p{N}{1,3}"), ignore_merges=True),
    "dbrx": _Rule(lambda: _words(r"\p{N}{1,3}")),
    "gpt-4o": _Rule(_cased_words),
    "qwen2": _Rule(lambda: _words(r"\p{N}"), normalizer=normalizers.NFC),
}

_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""The added tokens of a Phi-3 that do not take the white space behind them, which no key says."""


def gguf_tokenizer(vocabulary: GgufVocabulary, architecture: str) -> Tokenizer:
    """The tokenizer of a model in a GGUF file.

    Raises:
        ModelError: something in it is unknown; a sentence says what.
    """
    if vocabulary.model not in _ALGORITHMS:
        raise ModelError(
            f"The GGUF tokenizer model {vocabulary.model!r} is not supported; these are: "
            f"{', '.join(map(repr, _ALGORITHMS))}. {INSTEAD}"
        )
    tokenizer, usual = _ALGORITHMS[vocabulary.model](vocabulary)
    strips = architecture == "phi3" and vocabulary.model == "llama"
    tokenizer.add_tokens(_added_tokens(vocabulary, strips))
    bos = usual if vocabulary.add_bos_token is None else vocabulary.add_bos_token
    _enclose(tokenizer, vocabulary, bos, bool(vocabulary.add_eos_token))
    return tokenizer


def _byte_level(vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether texts usually begin with a token of their own."""
    name = vocabulary.pre
    if name not in _RULES:
        raise ModelError(
            f"The GGUF pre-tokenizer {name!r} is not known (known: {', '.join(_RULES)}), and a "
            f"guess would give wrong tokens. {INSTEAD}"
        )
    if vocabulary.add_space_prefix:
        raise ModelError(
            "The GGUF file's byte-level tokenizer puts a space before texts, which tools do not "
            f"agree about. {INSTEAD}"
        )
    rule = _RULES[name]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.numbers, merges=_merges(vocabulary), ignore_merges=rule.ignore_merges
        )
    )
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    tokens, merges = vocabulary.numbers, []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= tokens.keys():
            raise ModelError(
                f"The merges of the GGUF file's tokenizer are malformed: {merge!r} does not make a "
                f"token of two. {INSTEAD}"
            )
        merges.append((left, right))
    return merges


_ALGORITHMS: dict[str, Callable[[GgufVocabulary], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": lambda vocabulary: (sentencepiece_bpe(vocabulary), True),
}
"""By `tokenizer.ggml.model`."""


def _added_tokens(vocabulary: GgufVocabulary, strips: bool) -> list[AddedToken]:
    """Those that are matched whole, before all else: special tokens, to which those that end texts
    and turns belong whatever their type is, and user-defined ones.

    strips: whether white space behind them is left out.
    """
    tokens, added = vocabulary.tokens, []
    ends = {*vocabulary.roles.values(), *vocabulary.ends_of_turns}
    types = vocabulary.token_type or [TokenType.NORMAL] * len(tokens)
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or number in ends
        if special or kind == TokenType.USER_DEFINED:
            rstrip = strips and token not in _UNSTRIPPED
            added.append(AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    return added


def _enclose(tokenizer: Tokenizer, vocabulary: GgufVocabulary, bos: bool, eos: bool) -> None:
    """Have texts begin with the token `bos`, and end with `eos`, as those of models for embeddings
    do.
    """
    roles = [role for role, wanted in {"bos": bos, "eos": eos}.items() if wanted]
    if missing := [role for role in roles if role not in vocabulary.roles]:
        raise ModelError(
            f"The GGUF metadata adds tokens to texts, but lacks {' and '.join(missing)}_token_id. "
            f"Convert the model again. {INSTEAD}"
        )
    added = {
        role: (vocabulary.tokens[vocabulary.roles[role]], vocabulary.roles[role]) for role in roles
    }
    before, after = ([added[role][0]] if role in added else [] for role in ("bos", "eos"))
    if added:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=list(added.values()),
        )
