"""What stands for a transformer in the EchoEngine: a hash of the cells of a sequence.

A cell is what one position leaves in the KV pool: its token, its position, its owner (a tenant, and
the LoRA adapter that computed it), and the hash of all cells before it, as real keys and values
depend on all that came before. The hash of a sequence's cells gives the logits of its next token.
So one wrong cell, wherever it comes from, changes every token after it. It gives the sequence's
embedding, too.
"""

import math
import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256, shake_128
from zlib import crc32

from pagefleet.params import SamplingParams
from pagefleet.wire import Floats, Logprobs, pack_floats
from pagefleet_worker.grammar import NO_GRAMMARS, Grammars
from pagefleet_worker.sampling.draw import NO_TOKEN, Draw
from pagefleet_worker.sampling.sparse_logits import SparseLogits, pack_logprobs

CANDIDATES = 64
"""Tokens that have a logit of their own."""

CELL = struct.Struct("<iiI4s")
"""Token, position, owner, hash of the cells before."""

_LOGIT_RANGE = 8.0
"""The candidates' logits lie between 0 and this."""

_END_LOGIT = 10.0
"""Of the end of the sequence where it comes: above all others, for greedy streams to end too."""

_END_SHARE = 1 / 100
"""Share of the positions where the end of the sequence has that logit."""

_DRAWN = struct.Struct(f"<{CANDIDATES + 2}H")

EMBEDDING_SIZE = 16
"""Numbers of an embedding."""

_EMBEDDED = struct.Struct(f"<{EMBEDDING_SIZE}h")


def owner_of(salt: bytes, adapter: int) -> int:
    """The number in a cell of what a tenant has with an adapter; every other adapter has another,
    under whatever salt.
    """
    return crc32(salt, adapter)


def poison(block: int, size: int) -> bytes:
    """Cells of a block that was never written, like no other block's and no sequence's."""
    return CELL.pack(-1, -1, block, b"void") * size


class Chain:
    """The hash of a sequence's cells, one after another."""

    def __init__(self, cells: bytes = b"") -> None:
        self._hash = sha256(cells)

    def append(self, token: int, position: int, owner: int) -> bytes:
        """Make the next cell and go on with it."""
        cell = CELL.pack(token, position, owner, self._hash.digest()[:4])
        self._hash.update(cell)
        return cell

    def digest(self) -> bytes:
        """The hash of all cells until here."""
        return self._hash.digest()


@dataclass(frozen=True, slots=True)
class EchoDecoder:
    """The model: a vocabulary, and the tokens that end its sequences.

    Raises:
        ValueError: the vocabulary has fewer tokens than there are candidates.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    grammars: Grammars = NO_GRAMMARS
    """Over its tokenizer."""

    def __post_init__(self) -> None:
        """Refuse a vocabulary that is too small."""
        if self.vocab_size < CANDIDATES:
            raise ValueError(f"the echo engine needs a vocabulary of {CANDIDATES} tokens or more")

    def logits(self, digest: bytes) -> SparseLogits:
        """Of the token that follows the cells of this hash.

        The candidates are spread evenly over the vocabulary.
        """
        *levels, offset, end = _DRAWN.unpack(shake_128(digest).digest(_DRAWN.size))
        stride = self.vocab_size // CANDIDATES
        first = offset % (self.vocab_size - (CANDIDATES - 1) * stride)
        tokens = range(first, first + CANDIDATES * stride, stride)
        logits = [level * (_LOGIT_RANGE / 65536) for level in levels]
        if self.eos_token_ids and end < 65536 * _END_SHARE:
            return self._ending(tokens, logits, self.eos_token_ids[end % len(self.eos_token_ids)])
        return SparseLogits(self.vocab_size, tokens, logits)

    def _ending(self, tokens: Sequence[int], logits: list[float], end: int) -> SparseLogits:
        """The same, with the end of the sequence as the most likely token."""
        place = bisect_left(tokens, end)
        found = place < len(tokens) and tokens[place] == end
        logits[place : place + found] = [_END_LOGIT]
        tokens = [*tokens[:place], end, *tokens[place + found :]]
        return SparseLogits(self.vocab_size, tokens, logits)


def embedding_of(digest: bytes, dimensions: int) -> Floats:
    """The embedding of the cells of this hash; see `SamplingParams.embedding`."""
    whole = _EMBEDDED.unpack(shake_128(digest).digest(_EMBEDDED.size))
    numbers = whole[: dimensions or EMBEDDING_SIZE]
    length = math.hypot(*numbers) or 1.0
    return pack_floats(number / length for number in numbers)


@dataclass(frozen=True, slots=True)
class EchoStream:
    """A choice as it must come out."""

    tokens: list[int]
    logprobs: list[Logprobs]
    """One for each token, if they are asked for."""


def echo_tokens(
    decoder: EchoDecoder,
    prompt: Sequence[int],
    params: SamplingParams,
    choice: int = 0,
    salt: bytes = b"",
) -> EchoStream:
    """The stream of one choice, without pages, batches, processes or faults: the oracle of tests.

    It ends with a token that ends it, after `max_tokens`, or where no token can be chosen.
    """
    chain, owner = Chain(), owner_of(salt, params.adapter)
    for position, token in enumerate(prompt):
        chain.append(token, position, owner)
    history = list(prompt)
    stream = EchoStream([], [])
    guided = decoder.grammars.begin(params.guide) if params.guide else None
    for position in range(params.max_tokens):
        logits = decoder.logits(chain.digest())
        mask = guided.mask(array("i", stream.tokens)) if guided else None
        token = logits.choose(Draw(0, params, history, len(prompt), choice, position, mask))
        if token == NO_TOKEN:
            break
        stream.tokens.append(token)
        if params.logprobs is not None:
            stream.logprobs.append(pack_logprobs([logits], [token], params.logprobs))
        if params.ends(token):
            break
        chain.append(token, len(history), owner)
        history.append(token)
    return stream


def echo_prompt_logprobs(
    decoder: EchoDecoder,
    prompt: Sequence[int],
    alternatives: int,
    salt: bytes = b"",
    adapter: int = 0,
) -> Logprobs:
    """Logprobs of a prompt's tokens from the second on."""
    chain, owner = Chain(), owner_of(salt, adapter)
    logits = []
    for position, token in enumerate(prompt[:-1]):
        chain.append(token, position, owner)
        logits.append(decoder.logits(chain.digest()))
    return pack_logprobs(logits, prompt[1:], alternatives)


def echo_embedding(
    prompt: Sequence[int], dimensions: int = 0, salt: bytes = b"", adapter: int = 0
) -> Floats:
    """The embedding of a prompt, without pages, batches, processes or faults."""
    chain, owner = Chain(), owner_of(salt, adapter)
    for position, token in enumerate(prompt):
        chain.append(token, position, owner)
    return embedding_of(chain.digest(), dimensions)
