"""Errors as bodies, in the form of the API that was asked.

All routes answer in OpenAI's form but those of Anthropic's Messages API, and any that a client asks
which names a version of that API. There an error has a type and a sentence; the type follows from
the status, but that what may be asked again in a while is `overloaded_error`. Statuses are the same
in both: where Anthropic says 529 it is 503 here, with `Retry-After`, which proxies know too.
"""

import re
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Scope

from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.record import record_of

MESSAGES_PATH: Final = "/v1/messages"
"""Where Anthropic's API is; what follows from it lies below."""

_VERSION: Final = b"anthropic-version"
_TO_MESSAGES: Final = re.compile(rb"[^ ]+ [^ ?]*%s[/? ]" % MESSAGES_PATH.encode())
_NAMES_VERSION: Final = re.compile(rb"\n%s:" % _VERSION, re.IGNORECASE)
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(msgspec.Struct):
    """What programs may look at: the code that it has in OpenAI's form."""

    error_code: str


class MessagesError(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""

    type: Literal["error"] = "error"
    error: MessagesError
    request_id: str | None
    """None where the request was refused before it got a name."""


def speaks_messages(scope: Scope) -> bool:
    """Whether the client of a request expects what Anthropic's API answers."""
    path = scope["path"]
    below = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    return below or _VERSION in dict(scope["headers"])


def begins_messages(head: bytes) -> bool:
    """The same, of as much of a request's head as came."""
    return _TO_MESSAGES.match(head) is not None or _NAMES_VERSION.search(head) is not None


def error_body(error: ApiError, scope: Scope) -> bytes:
    """As the answer to a request."""
    return messages_body(error, record_of(scope).id) if speaks_messages(scope) else error.body


def messages_body(error: ApiError, request: str | None) -> bytes:
    """As an answer of Anthropic's API to a request of this name."""
    return msgspec.json.encode(MessagesErrorBody(error=messages_error(error), request_id=request))


def messages_error(error: ApiError) -> MessagesError:
    """In the words of Anthropic's API; by those for a prompt that is too long agents know that they
    have to shorten theirs.
    """
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    details = UNSET if error.code is None else ErrorDetails(error.code)
    return MessagesError(_TYPES.get(error.status, default), message, details)
