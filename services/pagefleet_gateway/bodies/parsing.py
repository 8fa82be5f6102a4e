"""A request's body as a typed value: strict JSON, then types and ranges.

JSON is taken strictly: no NaN, no number beyond float64, no lone surrogate, no repeated key, UTF-8
only (RFC 8259; the standard library's parser takes all of these). What happens to fields that the
body does not have is `other_fields`.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from pagefleet_gateway.bodies.other_fields import is_ignored, shortened
from pagefleet_gateway.errors import ApiError, bad_request

MAX_FIELDS: Final = 256

MAX_CONTAINERS: Final = 100_000
"""Lists and objects in a body: the interpreter makes a million without a pause for others, and
collects garbage meanwhile, for which all streams would wait for a second."""

_Body = TypeVar("_Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class Parsed(Generic[_Body]):
    """A body, and the fields of it that are ignored."""

    body: _Body
    ignored: list[str]


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
    ignored = [name for name in document if is_ignored(name, document[name], body)]
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
            raise bad_request(f"The body has the key {shortened(name)} twice.", shortened(name))
        names.add(name)


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
