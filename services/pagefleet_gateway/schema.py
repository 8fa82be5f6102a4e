"""What clients may send: the bodies of both completion routes, with types and ranges.

The fields are those of the OpenAI API and of vLLM. `null` means absent. JSON is taken strictly: no
NaN, no number beyond float64, no lone surrogate, no repeated key, UTF-8 only (RFC 8259; the
standard library's parser takes all of these). A field of which nothing is known is ignored, and
named to the caller; one that nearly matches a known field, belongs to the other route, or asks for
what is not supported, is refused, because to ignore it would answer another question.
"""

import difflib
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from pagefleet.params import MAX_CHOICES, MAX_LOGPROBS
from pagefleet_gateway.errors import ApiError, bad_request

MAX_STOP_STRINGS: Final = 16
MAX_FIELDS: Final = 256
MAX_LISTED: Final = 1024
"""Entries of the lists of ids and words that shape sampling."""

_INT32_MAX = 2**31 - 1

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LISTED)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Word = Annotated[str, Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    """What a stream says about usage."""

    include_usage: bool | None = None
    """One more chunk at the end, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far, in every chunk."""


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields that both routes share."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Choices | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LISTED)] | None = None
    bad_words: Annotated[list[Word], Meta(max_length=MAX_LISTED)] | None = None
    allowed_token_ids: TokenIds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Alternatives | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=_INT32_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    """A text, several, token ids, or several lists of them."""
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None


class ContentPart(msgspec.Struct):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart]
    name: str | None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    """Not supported yet."""

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    max_completion_tokens: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_Body = TypeVar("_Body", CompletionBody, ChatBody)


@dataclass(frozen=True)
class Parsed(Generic[_Body]):
    """A body, and the fields of it of which nothing is known."""

    body: _Body
    ignored: list[str]


UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "audio": (),
    "beam_width": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": (),
    "timeout": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that would change the answer if they were obeyed, with the values that would not; where a
route has such a field (`echo` of completions), the route's own counts."""

INERT: Final = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store"}
)
"""Fields of the OpenAI API that change nothing of the answer; ignored, as unknown ones are."""

_KNOWN: dict[type[CompletionBody | ChatBody], set[str]] = {
    body: {field.encode_name for field in msgspec.structs.fields(body)}
    for body in (CompletionBody, ChatBody)
}
_ALL_KNOWN = {*UNSUPPORTED, *_KNOWN[CompletionBody], *_KNOWN[ChatBody]}
_BARE_NAMES = {name.replace("_", ""): name for name in _ALL_KNOWN}
_NEAR = 0.85
_ERROR_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `\$\.(?P<path>.*)`)?$", re.DOTALL)
_MISSING_FIELD = re.compile(r"required field `(\w+)`")


def parse(content: bytes, body: type[_Body]) -> Parsed[_Body]:
    """Read a request's body.

    Raises:
        ApiError: 400; it is not JSON, or a field is not acceptable.
    """
    document = _load(content)
    ignored = [name for name in document if not _is_known(name, document[name], body)]
    try:
        return Parsed(msgspec.convert(document, body), ignored)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from error


def _load(content: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(content)
        json.loads(content, object_pairs_hook=_refuse_repeats)
    except RecursionError:
        raise bad_request("The body's JSON is nested too deeply.") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise bad_request(f"The body is not acceptable JSON: {error}.") from error
    if not isinstance(document, dict):
        raise bad_request("The body must be a JSON object.")
    if len(document) > MAX_FIELDS:
        raise bad_request(f"The body has more than {MAX_FIELDS} fields.")
    return document


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise bad_request(f"The body has the key {_quoted(name)} twice.", _quoted(name))
        names.add(name)


def _is_known(name: str, value: Any, body: type[CompletionBody | ChatBody]) -> bool:
    """Whether the body has such a field, or knows that this value changes nothing.

    Raises:
        ApiError: to ignore it would be wrong.
    """
    if name in _KNOWN[body] or value is None:
        return True
    if name in UNSUPPORTED:
        if not any(type(value) is type(same) and value == same for same in UNSUPPORTED[name]):
            raise bad_request(f"{name} is not supported with this value yet.", name, "unsupported")
        return True
    if name in _ALL_KNOWN:
        raise bad_request(f"{name} does not belong to this route.", name, "unknown_field")
    if name not in INERT and (near := _nearest(name)) is not None:
        raise bad_request(
            f"{_quoted(name)} is no known field; is {near} meant?", _quoted(name), "unknown_field"
        )
    return False


def _nearest(name: str) -> str | None:
    bare = re.sub(r"[-_ ]", "", name[:64]).lower()
    matches = difflib.get_close_matches(bare, _BARE_NAMES, n=1, cutoff=_NEAR)
    return _BARE_NAMES[matches[0]] if matches else None


def _quoted(name: str) -> str:
    return name if len(name) <= 64 else name[:61] + "..."


def _invalid_field(text: str) -> ApiError:
    """From msgspec's message: "Expected `float` <= 2.0 - at `$.temperature`"."""
    match = _ERROR_PATH.match(text)
    assert match is not None
    reason, path = match["reason"], match["path"]
    if missing := _MISSING_FIELD.search(reason):
        path = f"{path}.{missing[1]}" if path else missing[1]
    if path is None:
        return bad_request(f"The body is not acceptable: {reason}.")
    field = re.split(r"[.\[]", path, maxsplit=1)[0]
    return bad_request(f"{path} is not acceptable: {reason}.", field)
