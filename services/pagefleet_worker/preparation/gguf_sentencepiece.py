"""SentencePiece's BPE (Kudo and Richardson, 2018) out of a GGUF file: Llama 2, Mistral, Gemma.

Of neighbours those are merged first whose piece has the highest score, and what is no piece becomes
the tokens of its bytes. A space is the character U+2581, so that pieces say where words begin. With
`add_space_prefix`, which holds unless a file says otherwise, the first word of a text has one too,
which decoding takes off again. A text is what stands between two special tokens: after each of them
there is such a space, as llama.cpp has it, and the tokenizer.json that Llama 2, Mistral 7B and
Phi-3 were published with.

The BPE of `tokenizers` has a list of pairs in the place of scores. It is made from them: every cut
of a piece into two others, the best piece's first. Files whose scores are all the same were made
from such a list, and have lost its order.
"""

from tokenizers import Tokenizer, decoders, models, normalizers

from pagefleet_worker.model_files import ModelError
from pagefleet_worker.preparation.gguf_vocabulary import INSTEAD, GgufVocabulary, TokenType

_SPACE = "\u2581"


def sentencepiece_bpe(vocabulary: GgufVocabulary) -> Tokenizer:
    """The tokenizer without added tokens.

    Raises:
        ModelError: it is of a kind that would give other tokens than these rules do.
    """
    if vocabulary.remove_extra_whitespaces or vocabulary.precompiled_charsmap:
        raise ModelError(
            "The GGUF file's SentencePiece tokenizer changes texts before it cuts them, which is "
            f"not supported. {INSTEAD}"
        )
    if vocabulary.token_type.count(TokenType.BYTE) != 256 or not vocabulary.scores:
        raise ModelError(
            f"The GGUF file's tokenizer lacks scores, or tokens for single bytes. {INSTEAD}"
        )
    merges = _merges(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.numbers, merges=merges, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix is False:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(text)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Pairs of pieces, those that are merged first before others."""
    each = zip(vocabulary.tokens, vocabulary.scores, vocabulary.token_type, strict=True)
    scores = {token: score for token, score, kind in each if kind == TokenType.NORMAL}
    cuts = {
        token: [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in scores and token[cut:] in scores
        ]
        for token in scores
    }
    merged = [token for token, pairs in cuts.items() if pairs]
    if len(merged) > 1 and len({scores[token] for token in merged}) == 1:
        raise ModelError(
            "The scores of the GGUF file's tokenizer are all the same, and do not say which pieces "
            f"are merged first. {INSTEAD}"
        )
    merged.sort(key=lambda token: -scores[token])
    return [pair for token in merged for pair in cuts[token]]
