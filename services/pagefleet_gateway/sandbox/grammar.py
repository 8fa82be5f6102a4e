"""Grammars that workers can follow: compiled as a worker would, over a vocabulary of bytes.

Whatever form a grammar comes in, workers get it in llguidance's notation. What cannot be compiled,
asks for what is not supported, is satisfied by no text or is too large to begin is refused, with a
reason. (What becomes too large later ends its request, in the worker.) llguidance counts a
grammar's work and stops it, but not all of it: a grammar is compiled in a helper process.
"""

from collections.abc import Callable
from functools import cache
from typing import Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from pagefleet.params import MAX_FORCED_BYTES, MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_ITEMS
from pagefleet_gateway.sandbox.grammar_job import Compiled, Source

_MAX_REASON: Final = 300


def begin(content: bytes) -> Callable[[bytes], bytes]:
    """A helper's work (`helper`): jobs are `Source`s, results are `Compiled`."""
    _byte_tokenizer()
    source = msgspec.msgpack.Decoder(Source)
    return lambda job: msgspec.msgpack.encode(compiled(source.decode(job)))


def compiled(source: Source) -> Compiled:
    """Compile a grammar."""
    try:
        grammar = _translated(source)
    except (ValueError, RecursionError) as error:
        return Compiled("", _reason(str(error)))
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        return Compiled("", f"it has more than {MAX_GRAMMAR_CHARACTERS} characters")
    limits = LLParserLimits(step_max_items=MAX_GRAMMAR_ITEMS)
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=limits)
    if len(matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
        return Compiled("", f"it forces more than {MAX_FORCED_BYTES} bytes in a row")
    matcher.compute_bitmask()
    matcher.try_consume_tokens(matcher.compute_ff_tokens())
    matcher.compute_bitmask()
    return Compiled(grammar, _reason(matcher.get_error()) if matcher.is_error() else None)


def _translated(source: Source) -> str:
    match source.form:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(source.text)
        case "llguidance":
            return source.text
        case form:
            return grammar_from(form, source.text)


class _Bytes:
    """A tokenizer in the form that llguidance wraps: a token for each byte, and an end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokenizer() -> LLTokenizer:
    end = _Bytes.eos_token_id
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=end + 1, eos_token=[end])


def _reason(text: str) -> str:
    """The library's words without its dumps, on one line."""
    head = text.partition("\n<state>")[0]
    if head.startswith("panic"):
        return "it asks for what a grammar over text cannot say"
    if head.startswith("NoExtension"):
        return "no text satisfies it"
    return " ".join(head.split())[:_MAX_REASON]
