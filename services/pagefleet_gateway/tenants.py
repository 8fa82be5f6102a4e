"""Who may ask, and how much: API keys, the tenants that hold them, and their limits.

Keys come from a file (TOML or JSON) that holds their SHA-256, never themselves:

    [[keys]]
    name = "search"
    sha256 = "2bb80d53..."        # printf %s "$KEY" | sha256sum
    requests_per_minute = 600     # this and all below may be left out: no limit
    tokens_per_minute = 100000    # of prompts and answers together
    concurrent_requests = 32
    max_priority = 0              # lower numbers go first; this is the lowest that it may ask for
    admin = true                  # may see what other keys do: /metrics and /memory
    weight = 2.0                  # where others wait too, its share of the service; 1.0 if left out

The file is read again when it changes; what tenants have used stays counted. A key is compared as
its hash, with all known ones, in constant time. Without any key everybody is one tenant.

Limits hold for all gateways of a cell together, as far as they know of each other: the scheduler
tells each, five times a second, what the others' tenants use. So a tenant may exceed its limits by
what it begins elsewhere within 0.2 s; each gateway that starts gives every tenant a minute's worth
anew, and while there is no scheduler each counts for itself.
"""

import hashlib
import hmac
import logging
import math
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pagefleet.wire import Pulse, TenantUse
from pagefleet_gateway.allowance import Allowance
from pagefleet_gateway.errors import bad_request, too_many

_LOG = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0
"""Between two looks at the file."""

_Limit = Annotated[int, Meta(ge=1)]


class KeyFileError(Exception):
    """The file of keys cannot be used; says why."""


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key of the file."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\w.-]+$")]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent_requests: _Limit | None = None
    max_priority: int | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000.0)] = 1.0
    admin: bool = False


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Terms]


class Tenant:
    """Holder of one key, and what it uses."""

    def __init__(self, terms: Terms | None = None) -> None:
        self._terms = terms
        self._requests = Allowance(terms.requests_per_minute if terms else None)
        self._tokens = Allowance(terms.tokens_per_minute if terms else None)
        self.requests = 0
        """Taken since the start."""
        self.tokens = 0
        self.open = 0
        """Requests that are being answered."""
        self._elsewhere: TenantUse | None = None

    def __repr__(self) -> str:
        return f"<Tenant {self.name!r} {self.open} open>"

    @property
    def name(self) -> str:
        """As logs and metrics show it; empty for everybody."""
        return self._terms.name if self._terms else ""

    @property
    def digest(self) -> bytes | None:
        """SHA-256 of the key: content is shared in the prefix cache only under the same one."""
        return bytes.fromhex(self._terms.sha256) if self._terms else None

    @property
    def is_admin(self) -> bool:
        """It may see what other tenants do."""
        return self._terms is None or self._terms.admin

    @property
    def weight(self) -> float:
        """Its share of the service, beside other tenants'."""
        return self._terms.weight if self._terms else 1.0

    def change(self, terms: Terms) -> None:
        """Hold the same key on other terms."""
        self._terms = terms
        self._requests.change(terms.requests_per_minute)
        self._tokens.change(terms.tokens_per_minute)

    @contextmanager
    def request(self, now: float) -> Iterator[None]:
        """Count a request for as long as it is answered.

        Raises:
            ApiError: 429; a limit is reached.
        """
        most = self._terms.concurrent_requests if self._terms else None
        elsewhere = self._elsewhere.open if self._elsewhere else 0
        if most is not None and self.open + elsewhere >= most:
            raise too_many(f"This key may have {most} requests open at once.")
        for allowance, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if wait := allowance.wait(now):
                raise too_many(f"This key has used up its {what} per minute.", math.ceil(wait))
        self._requests.take(1, now)
        self.requests += 1
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def charge(self, tokens: int, now: float) -> None:
        """Count tokens of prompts and answers."""
        self.tokens += tokens
        self._tokens.take(tokens, now)

    @property
    def use(self) -> TenantUse:
        """What it used here."""
        return TenantUse(self.requests, self.tokens, self.open)

    def learn(self, elsewhere: TenantUse, now: float, anew: bool) -> None:
        """Count what it used at other gateways; `anew`: since a scheduler that has just begun."""
        before = TenantUse(0, 0, 0) if anew else self._elsewhere or elsewhere
        self._requests.take(elsewhere.requests - before.requests, now)
        self._tokens.take(elsewhere.tokens - before.tokens, now)
        self._elsewhere = elsewhere

    def check_priority(self, priority: int) -> None:
        """Let a request pass that does not ask to go before what this tenant may.

        Raises:
            ApiError: 400.
        """
        first = self._terms.max_priority if self._terms else None
        if first is not None and priority < first:
            raise bad_request(f"priority must be {first} or more with this key.", "priority")


EVERYBODY: Final = Tenant()
"""The only tenant where no keys are asked for."""


class Keyring:
    """All keys that let a request in: one given to the gateway, and those of a file.

    Raises:
        KeyFileError: the file is not usable at the start. Later its last good state counts.
    """

    def __init__(self, api_key: str | None = None, file: Path | None = None) -> None:
        self._single = [] if api_key is None else [single_key(api_key)]
        self._file = file
        self._looked = -math.inf
        self._stamp: tuple[int, int] | None = None
        self._tenants: dict[bytes, Tenant] = {}
        self._epoch: int | None = None
        self._use([] if file is None else self._read(file))

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def is_open(self) -> bool:
        """Nobody needs a key."""
        return not self._single and self._file is None

    def find(self, key: bytes, now: float) -> Tenant | None:
        """The tenant that holds `key`; `now` decides whether the file is looked at."""
        self._look(now)
        digest = hashlib.sha256(key).digest()
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def used(self) -> dict[str, TenantUse]:
        """What each tenant used here, by name."""
        return {tenant.name: tenant.use for tenant in self._tenants.values() if tenant.requests}

    def learn(self, pulse: Pulse, now: float) -> None:
        """Count what tenants used elsewhere, as the scheduler knows it."""
        anew = self._epoch not in (None, pulse.epoch)
        self._epoch = pulse.epoch
        for tenant in self._tenants.values():
            tenant.learn(pulse.elsewhere.get(tenant.name, TenantUse(0, 0, 0)), now, anew)

    def _look(self, now: float) -> None:
        if self._file is None or now - self._looked < CHECK_SECONDS:
            return
        self._looked = now
        try:
            if _stamp(self._file) != self._stamp:
                self._use(self._read(self._file))
                _LOG.info("Read %s again: %d keys.", self._file, len(self))
        except (KeyFileError, OSError) as error:
            _LOG.error("The keys stay as they were: %s", error)

    def _read(self, file: Path) -> list[Terms]:
        try:
            self._stamp = _stamp(file)
            return read_keys(file)
        except OSError as error:
            raise KeyFileError(f"{file} cannot be read: {error.strerror}.") from error

    def _use(self, listed: list[Terms]) -> None:
        tenants = {}
        for terms in [*self._single, *listed]:
            digest = bytes.fromhex(terms.sha256)
            tenants[digest] = self._tenants.get(digest) or Tenant(terms)
            tenants[digest].change(terms)
        self._tenants = tenants


def read_keys(file: Path) -> list[Terms]:
    """The keys in a file of either form.

    Raises:
        KeyFileError: it holds something else.
        OSError: it cannot be read.
    """
    content = file.read_bytes()
    try:
        if file.suffix == ".json":
            listed = msgspec.json.decode(content, type=_KeyFile).keys
        else:
            listed = msgspec.convert(tomllib.loads(content.decode()), _KeyFile).keys
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{file} is no list of keys: {error}.") from error
    for name in ("name", "sha256"):
        counts = Counter(getattr(terms, name) for terms in listed)
        for value, count in counts.most_common(1):
            if count > 1:
                raise KeyFileError(f"{file} has the {name} {value!r} {count} times.")
    return listed


def single_key(key: str) -> Terms:
    """Those of a key that is given to the gateway itself."""
    return Terms("default", key_digest(key.encode()), admin=True)


def key_digest(key: bytes) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key).hexdigest()


def prefix_salt(key: bytes | None, cache_salt: str | None, adapter: int = 0) -> bytes:
    """What separates tenants in the prefix cache, and LoRA adapters, whose keys and values differ:
    SHA-256 over tagged, length-prefixed fields.

    Empty without key, salt and adapter: then all share.
    """
    named = [
        (b"key", key),
        (b"cache_salt", cache_salt and cache_salt.encode()),
        (b"adapter", adapter and str(adapter).encode()),
    ]
    fields = [(tag, value) for tag, value in named if value]
    if not fields:
        return b""
    digest = hashlib.sha256(b"pagefleet prefix salt, version 1;")
    for tag, content in fields:
        digest.update(tag + len(content).to_bytes(8, "big") + content)
    return digest.digest()


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_ino
