"""What goes wrong, as clients are told: one `ApiError`, in the form of the OpenAI API.

Every failure that a client may see is an `ApiError`; whatever else is raised below is translated
where it is understood. Anything that reaches the outermost handler is our bug, a plain 500.
"""

from typing import Final

import msgspec

from pagefleet.wire import Reason, Rejected

RETRY_SECONDS: Final = 1
"""What `Retry-After` says when nothing better is known."""


class _Detail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """`{"error": {"message", "type", "param", "code"}}`."""

    error: _Detail


class ApiError(Exception):
    """An answer other than the one asked for.

    status: of HTTP. type, code: the classes of the OpenAI API. param: the field of the request's
    body at fault. retry_after: seconds after which the same request may succeed. final: it will not
    succeed, though OpenAI's clients repeat what is answered with that status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.final = final

    @property
    def body(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(
            ErrorBody(_Detail(self.message, self.type, self.param, self.code))
        )

    def headers(self, body: bytes) -> list[tuple[bytes, bytes]]:
        """For an answer of nothing but this error, whose body has its form."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        if self.final:
            headers.append((b"x-should-retry", b"false"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be right whenever it is sent."""
    return ApiError(400, message, type="invalid_request_error", param=param, code=code)


def http_error(status: int, message: str, code: str | None = None) -> ApiError:
    """A request refused before its body was understood: 401, 404, 405, 408, 413, 415, 431."""
    type = "authentication_error" if status == 401 else "invalid_request_error"
    return ApiError(status, message, type=type, code=code)


def unknown_model(name: str) -> ApiError:
    """Some other model is served."""
    return ApiError(
        404,
        f"The model {name!r} is not served here; /v1/models lists what is.",
        type="invalid_request_error",
        param="model",
        code="model_not_found",
    )


def too_many(message: str, retry_after: int = RETRY_SECONDS) -> ApiError:
    """The tenant is over a limit of its own."""
    return ApiError(
        429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after=retry_after
    )


def unavailable(message: str, code: str) -> ApiError:
    """No service at the moment."""
    return ApiError(
        503, message, type="service_unavailable_error", code=code, retry_after=RETRY_SECONDS
    )


def too_late() -> ApiError:
    """The request's deadline passed before its first token."""
    return ApiError(
        504,
        "The time that the request allows passed before its first token.",
        type="timeout_error",
        param="timeout",
        code="deadline_exceeded",
        retry_after=RETRY_SECONDS,
    )


def aborted() -> ApiError:
    """An answer that ended before its time, for clients that know no such finish."""
    return bad_request("An answer was aborted: nothing more could follow it.", None, "aborted")


def internal_error(code: str = "internal_error") -> ApiError:
    """Our fault; the log knows more than the client needs to."""
    return ApiError(
        500,
        "The server failed to process the request. Sending it again may help.",
        type="server_error",
        code=code,
    )


def from_rejection(rejection: Rejected) -> ApiError:
    """What the scheduler's refusal means over HTTP."""
    match rejection.reason:
        case Reason.INVALID:
            return bad_request(rejection.text, rejection.param)
        case Reason.TOO_LONG:
            return bad_request(rejection.text, rejection.param, "context_length_exceeded")
        case Reason.OVERLOADED:
            return unavailable(rejection.text, "overloaded")
        case Reason.NO_WORKER:
            return unavailable(rejection.text, "no_worker")
        case Reason.FAILED:
            return ApiError(500, rejection.text, type="server_error", code="request_failed")
        case Reason.QUARANTINED:
            text, code = rejection.text, "request_quarantined"
            return ApiError(500, text, type="server_error", code=code, final=True)
        case Reason.MOVED:
            text, code = rejection.text, "stream_moved"
            return ApiError(409, text, type="invalid_request_error", code=code, final=True)
