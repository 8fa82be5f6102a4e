"""How commands ask a gateway over HTTP, and what they say if that fails.

The key is taken from the environment (`PAGEFLEET_API_KEY`), and so is the file of authorities to
trust if OpenSSL's own are not enough (`SSL_CERT_FILE`).
"""

import argparse
import http.client
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping

import msgspec

KEY = "PAGEFLEET_API_KEY"

DEFAULT_URL = "http://127.0.0.1:8000"

BROKEN = (OSError, http.client.HTTPException)
"""What a connection raises that cannot be made, or breaks."""


class Unanswered(Exception):
    """No gateway answers; says why, and what to try."""


class Detail(msgspec.Struct):
    """What a gateway says about an error."""

    message: str
    type: str = ""


class Refused(Exception):
    """The gateway answers with an error; `detail` is what it says."""

    def __init__(self, detail: Detail) -> None:
        super().__init__(detail.message)
        self.detail = detail


class _Body(msgspec.Struct):
    error: Detail


def gateway_url(text: str) -> str:
    """The address of a gateway without `/v1`, with which a user may write it.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address of a gateway; write for example {DEFAULT_URL}"
        )
    return text.rstrip("/").removesuffix("/v1")


def ask(
    url: str,
    path: str,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 10.0,
) -> http.client.HTTPResponse:
    """GET, or POST `content` to, a path of the gateway at `url`; `timeout` is in seconds.

    Raises:
        Refused: it answers with an error.
        Unanswered: it does not answer.
    """
    request = urllib.request.Request(url + path, content, dict(headers or {}))
    if key := os.environ.get(KEY):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(_detail(error)) from error
    except BROKEN as error:
        raise Unanswered(_why(url, getattr(error, "reason", error))) from error
    return response


def _detail(error: urllib.error.HTTPError) -> Detail:
    try:
        detail = msgspec.json.decode(error.read(), type=_Body).error
    except BROKEN as broken:
        raise Unanswered(f"{error.url} answers {error}, and breaks off: {broken}.") from error
    except msgspec.DecodeError:
        return Detail(f"{error.url} answers {error}; is this the address of a gateway?")
    if error.code == http.HTTPStatus.UNAUTHORIZED:
        detail.message += f" Set {KEY} to a key."
    return detail


def _why(url: str, error: object) -> str:
    match error:
        case ConnectionRefusedError():
            cure = "nothing listens there; start a cell with `pagefleet serve`, or name its --url"
        case ssl.SSLCertVerificationError():
            cure = (
                f"its certificate is not trusted ({error.verify_message}); if it is your own, set "
                "SSL_CERT_FILE to a file with it"
            )
        case ssl.SSLError():
            cure = f"it does not speak TLS ({error.reason}); try http:// in place of https://"
        case http.client.RemoteDisconnected():
            cure = "it hung up without an answer; if it has a certificate, try https://"
        case _:
            cure = str(error)
    return f"{url} does not answer: {cure}."
