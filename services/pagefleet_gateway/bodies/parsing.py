"""A request's body as a typed value: strict JSON, then types and ranges, then unknown fields.

JSON is taken strictly: no NaN, no number beyond float64, no lone surrogate, no repeated key, UTF-8
only (RFC 8259; the standard library's parser takes all of these). A field of which nothing is known
is ignored, and named to the caller; one that nearly matches a known field, belongs to another
route, or asks for what is not supported, is refused, because to ignore it would answer another
question.
"""

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, TypeVar

import msgspec

from pagefleet_gateway.bodies.embedding_body import EmbeddingBody
from pagefleet_gateway.bodies.messages_body import MessagesBody
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import INERT, RENAMED, UNSUPPORTED, ChatBody, CompletionBody
from pagefleet_gateway.errors import ApiError, bad_request

MAX_FIELDS: Final = 256

MAX_CONTAINERS: Final = 100_000
"""Lists and objects in a body: the interpreter makes a million without a pause for others, and
collects garbage meanwhile, for which all streams would wait for a second."""

_Body = TypeVar("_Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class Parsed(Generic[_Body]):
    """A body, and the fields of it of which nothing is known."""

    body: _Body
    ignored: list[str]


@cache
def _fields(body: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(body))


_BODIES: Final = (CompletionBody, ChatBody, ResponseBody, MessagesBody, EmbeddingBody)
_ALL_KNOWN = {*UNSUPPORTED}.union(*map(_fields, _BODIES))
_NEAR = 0.85
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
"""In JSON; what does not end is one, too, so that nothing is looked at twice."""

_ERROR_PATH = re.compile(r"^(?P<reason>.*?)(?: - at (?:`key` in )?`\$\.(?P<path>.*)`)?$", re.DOTALL)
_HINTS: Final = {
    re.compile(r"messages\[\d+\]\.content\[\d+\](\.content\[\d+\])?\.type"): "only parts of "
    "type text are supported",
    re.compile(r"input\[\d+\]\.(content|output)\[\d+\]\.type"): "only text is "
    "supported, in parts of type input_text, output_text and refusal",
    re.compile(r"input\[\d+\]\.type"): "nothing is stored here, and there are no built-in tools: "
    "messages, function calls with their outputs, and reasoning are supported",
    re.compile(r"tools\[\d+\]\.type"): "there are no built-in tools here, only functions",
}
"""What to say of a value that is not among those of a path."""

_ITEM = re.compile(r"input\[\d+\](\.(content|output)\[\d+\])?")
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
    if _containers(content) > MAX_CONTAINERS < _containers(_STRING.sub(b"", content)):
        raise bad_request(f"The body's JSON has more than {MAX_CONTAINERS} lists and objects.")
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


def _containers(content: bytes) -> int:
    """Lists and objects in JSON, where its strings have no brackets."""
    return content.count(b"[") + content.count(b"{")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise bad_request(f"The body has the key {_quoted(name)} twice.", _quoted(name))
        names.add(name)


def _is_known(name: str, value: Any, body: type[msgspec.Struct]) -> bool:
    """Whether the body has such a field, or knows that this value changes nothing.

    Raises:
        ApiError: to ignore it would be wrong.
    """
    if name in _fields(body) or value is None:
        return True
    if name in UNSUPPORTED:
        if not any(type(value) is type(same) and value == same for same in UNSUPPORTED[name]):
            raise bad_request(f"{name} is not supported with this value yet.", name, "unsupported")
        return True
    if name in INERT:
        return False
    if name in _ALL_KNOWN:
        raise bad_request(f"{name} does not belong to this route.", name, "unknown_field")
    if (near := RENAMED.get(name) or _nearest(name, body)) is not None:
        raise bad_request(
            f"{_quoted(name)} is no known field; is {near} meant?", _quoted(name), "unknown_field"
        )
    return False


def _nearest(name: str, body: type[msgspec.Struct]) -> str | None:
    bare = re.sub(r"[-_ ]", "", name[:64]).lower()
    names = {known.replace("_", ""): known for known in _fields(body) | UNSUPPORTED.keys()}
    matches = difflib.get_close_matches(bare, names, n=1, cutoff=_NEAR)
    return names[matches[0]] if matches else None


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
    for pattern, hint in _HINTS.items():
        if pattern.fullmatch(path):
            reason += f"; {hint}"
    item = _ITEM.match(path)
    field = item[0] if item else re.split(r"[.\[]", path, maxsplit=1)[0]
    return bad_request(f"{path} is not acceptable: {reason}.", field)
