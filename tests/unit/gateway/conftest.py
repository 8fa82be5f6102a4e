"""Small tokenizers of each kind, made here."""

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagefleet.byte_alphabet import CHARACTER_OF_BYTE

SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer() -> Tokenizer:
    """All bytes, a few merges, and a user-defined token of characters outside the alphabet."""
    merges = [("h", "e"), ("l", "l"), ("Ġ", "t"), ("Ġt", "he"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    tokens = [*CHARACTER_OF_BYTE, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added_tokens(tokenizer)


def piece_tokenizer() -> Tokenizer:
    """SentencePiece-like: pieces with ▁, byte fallback, the first space dropped in decoding."""
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("▁", "▁")]
    alphabet = ["▁", *string.ascii_letters, *string.digits, *"<>|/_.,!\n"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", *bytes_, *alphabet, *(left + right for left, right in merges), "\ufffd"]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_added_tokens(tokenizer)


def metaspace_tokenizer() -> Tokenizer:
    """The same pieces cut by Metaspace, which marks only the first word of a text."""
    tokenizer = piece_tokenizer()
    tokenizer.normalizer = normalizers.Replace(Regex(" {5,}"), "    ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def metaspace_decoder_tokenizer() -> Tokenizer:
    """Pieces without byte fallback, decoded by Metaspace itself."""
    tokenizer = metaspace_tokenizer()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken("<tool→>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer


BACKENDS = {
    "byte level": byte_level_tokenizer,
    "pieces": piece_tokenizer,
    "metaspace": metaspace_tokenizer,
    "metaspace decoder": metaspace_decoder_tokenizer,
}
