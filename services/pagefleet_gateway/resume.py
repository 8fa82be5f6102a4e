"""A stream that broke goes on at any gateway: the id of an event says what its reader has.

    id: <ticket>.<position>-<position>-...

The ticket names the answer and its seed, and is signed together with the body and the tenant it was
given for; whoever sends the same body with `Last-Event-ID` gets the rest of the very same stream.
A position is the number of a choice's tokens behind the event, their CRC-32 and the numerics class
that the latest were computed in, with a `!` where the choice has ended. The ticket also names the
run that the stream came from. If the scheduler still has that, it sends it again from the first
token; otherwise the tokens are generated again with the same seed, which gives them again bit for
bit if a worker of the same class is there. What the reader has is passed over; by its CRC a stream
fails rather than that its rest be another stream's. Positions are not signed: a wrong one cheats
nobody else.

Gateways that are to take over from each other share a secret (`--resume-secret`). A stream of more
than `MOST_CHOICES` choices has no ids: in each of its many events they would be longer than what
proxies let pass as a header.
"""

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import msgspec

from pagefleet.wire import ChoiceState, Numerics
from pagefleet_gateway.errors import ApiError, bad_request, http_error

MOST_CHOICES: Final = 128
"""Of a stream whose events have ids; of all its prompts together."""

_SIGNATURE_BYTES = 16
_LONGEST_ID = 6 * 1024
_POSITION = re.compile("([0-9]{1,9}):([0-9a-f]{1,8})(?::([0-9a-f]{1,8}))?(!?)")


@dataclass(frozen=True, slots=True)
class Had:
    """What the reader of a stream has of one choice."""

    count: int
    """Tokens, or events where those are counted."""
    digest: int = 0
    """CRC-32 of all tokens that it has something of, as little-endian int32."""
    finished: bool = False
    numerics: Numerics = 0
    """That the latest of them were computed in."""

    def state(self, index: int) -> ChoiceState:
        """The choice, as one that is to be made again from its first token, unless it has ended."""
        return ChoiceState(index, finished=self.finished, numerics=self.numerics)


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What makes a stream again, besides its request's body."""

    answer: str
    """The id that the client sees."""
    created: int
    """Unix time of the answer's beginning."""
    run: str
    """Names the requests that the stream came from: see `request_id`."""
    seed: int
    model: str
    """Fingerprint of the model that wrote it."""
    tenant: bytes
    """A digest; whose stream it is."""
    context: int = 0
    """Tokens that prompt and answer may have together, which the workers of its beginning could
    hold; 0: none was known then."""

    def sign(self, secret: bytes, body: bytes) -> str:
        """The ticket as text without dots, valid for this body alone."""
        content = msgspec.msgpack.encode(self)
        signed = content + _signature(secret, content, body)
        return urlsafe_b64encode(signed).rstrip(b"=").decode()


def changed() -> ApiError:
    """What was generated again is not what the reader has."""
    text = "This stream cannot be resumed: what would compute it now computes other tokens."
    return http_error(410, text, "gone")


def request_id(run: str, prompt: int) -> str:
    """What the scheduler knows a prompt of a run by."""
    return f"{run}-{prompt}"


def position(had: Had) -> str:
    """Of a reader in one choice, as the ids of events tell it."""
    numerics = f":{had.numerics:x}" if had.numerics else ""
    return f"{had.count}:{had.digest:x}{numerics}" + "!" * had.finished


def event_id(ticket: str, positions: Iterable[str]) -> str:
    """The id of an event after which the reader is at these positions of the choices."""
    return ticket + "." + "-".join(positions)


def read_event_id(
    text: str, secret: bytes, body: bytes, tenant: bytes
) -> tuple[Ticket, Mapping[int, Had]]:
    """The ticket and what the reader has of each choice.

    Raises:
        ApiError: 400, it is no id of ours; 403, it is somebody else's; 410, it is of another body
            or of a gateway with another secret, so that its stream cannot be made again.
    """
    encoded, _, positions = text.partition(".")
    malformed = bad_request("Last-Event-ID is not the id of an event of a stream.", "Last-Event-ID")
    if len(text) > _LONGEST_ID or not text.isascii():
        raise malformed
    try:
        signed = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        content, signature = signed[:-_SIGNATURE_BYTES], signed[-_SIGNATURE_BYTES:]
        ticket = msgspec.msgpack.decode(content, type=Ticket)
        had = [_read_position(position) for position in positions.split("-")]
    except (Base64Error, msgspec.DecodeError, ValueError):
        raise malformed from None
    if not hmac.compare_digest(signature, _signature(secret, content, body)):
        text = "This stream cannot be resumed: its id is of another body, or of other gateways."
        raise http_error(410, text, "gone")
    if not hmac.compare_digest(ticket.tenant, tenant):
        raise ApiError(
            403,
            "This stream is another client's.",
            type="permission_error",
            code="not_your_stream",
        )
    return ticket, dict(enumerate(had))


def _read_position(text: str) -> Had:
    found = _POSITION.fullmatch(text)
    if found is None:
        raise ValueError(text)
    count, digest, numerics, end = found.groups()
    return Had(int(count), int(digest, 16), bool(end), int(numerics or "0", 16))


def _signature(secret: bytes, content: bytes, body: bytes) -> bytes:
    digest = sha256(body).digest()
    return hmac.digest(secret, b"pagefleet stream\0" + digest + content, "sha256")[
        :_SIGNATURE_BYTES
    ]
