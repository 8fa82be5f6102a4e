"""Fields of a body that its route does not have: ignored and named to the caller, or refused.

Clients are made for several servers. What they send of which nothing is known here, or that another
route has, or that changes nothing, is ignored, and the caller is told so. It is refused where the
answer would be another than the one asked for: what is nearly the name of a field that the route
has, or another route's name for one, and what would change the answer.
"""

import difflib
import re
from functools import cache
from typing import Any, Final

import msgspec

from pagefleet_gateway.bodies.embedding_body import EmbeddingBody
from pagefleet_gateway.bodies.messages_body import MessagesBody
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import ChatBody, CompletionBody
from pagefleet_gateway.bodies.structured import StructuredOutputs
from pagefleet_gateway.errors import bad_request


@cache
def _fields(body: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(body))


UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "chat_template": (),
    "compaction": (),
    "container": (),
    "continue_final_message": (False,),
    "conversation": (),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "normalize": (True,),
    "previous_response_id": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "stream": (False,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_activation": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields that would change the answer if they were obeyed, with the values that would not; where a
route has such a field, the route's own counts."""

_SCHEMAS: Final = ("response_format", "text.format", "output_config.format")
MEANT: Final[dict[str, tuple[str, ...]]] = {
    **{f"guided_{each}": (f"structured_outputs.{each}",) for each in _fields(StructuredOutputs)},
    "input": ("messages", "prompt"),
    "instructions": ("system", "messages", "prompt"),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens",),
    "messages": ("input", "prompt"),
    "output_config": _SCHEMAS,
    "output_format": _SCHEMAS,
    "prompt": ("messages", "input"),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    "response_format": _SCHEMAS,
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "system": ("instructions", "messages", "prompt"),
    "text": _SCHEMAS,
}
"""Names that other routes, or servers, have for fields: the first that a route has is meant."""

_NEAR: Final = 0.85
_NO_SLIPS: Final = frozenset({"models", "reasoning_format", "speed"})
"""Fields of OpenRouter, llama.cpp and Anthropic that only look like some of ours misspelt."""

_BODIES: Final = (CompletionBody, ChatBody, ResponseBody, MessagesBody, EmbeddingBody)
_KNOWN: Final = _NO_SLIPS.union(*map(_fields, _BODIES))


def is_ignored(name: str, value: Any, body: type[msgspec.Struct]) -> bool:
    """Whether nothing comes of a field, though something might be expected.

    Raises:
        ApiError: 400; to ignore it would be wrong.
    """
    if name in _fields(body) or value is None or _is_so_anyway(name, value):
        return False
    if (meant := _meant(name, body)) is not None:
        shown = shortened(name)
        text = f"{shown!r} is no field of this route; is {meant} meant?"
        raise bad_request(text, shown, "unknown_field")
    if name in UNSUPPORTED:
        text = f"{name} is not supported here with this value."
        raise bad_request(text, name, "unsupported")
    return True


def shortened(name: str) -> str:
    """A name of any length for a sentence."""
    return name if len(name) <= 64 else name[:61] + "..."


def _is_so_anyway(name: str, value: Any) -> bool:
    return any(type(value) is type(same) and value == same for same in UNSUPPORTED.get(name, ()))


def _meant(name: str, body: type[msgspec.Struct]) -> str | None:
    """The field of the route that is nearly this one, or is this one in other words."""
    fields = _fields(body)
    if name in MEANT:
        known = (each for each in MEANT[name] if each.partition(".")[0] in fields)
        return next(known, None)
    if name in _KNOWN or name in UNSUPPORTED:
        return None
    bare = re.sub(r"[-_ ]", "", name[:64]).lower()
    names = {known.replace("_", ""): known for known in fields | (UNSUPPORTED.keys() - _KNOWN)}
    matches = difflib.get_close_matches(bare, names, n=1, cutoff=_NEAR)
    return names[matches[0]] if matches else None
