"""Keys, and what their holders may do."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pagefleet.wire import Pulse, TenantUse
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.tenants import (
    CHECK_SECONDS,
    EVERYBODY,
    KeyFileError,
    Keyring,
    Tenant,
    Terms,
    read_keys,
)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def written(path: Path, *keys: dict[str, Any]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps({"keys": keys}))
    else:
        lines = [
            "\n".join(["[[keys]]", *(f"{n} = {json.dumps(v)}" for n, v in key.items())])
            for key in keys
        ]
        path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("name", ["keys.toml", "keys.json"])
def test_a_file_of_either_form(tmp_path: Path, name: str) -> None:
    fields = {"name": "a", "sha256": digest("one"), "tokens_per_minute": 5, "max_priority": -1}
    assert read_keys(written(tmp_path / name, fields)) == [
        Terms("a", digest("one"), tokens_per_minute=5, max_priority=-1)
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no toml", "no list of keys"),
        ('[[keys]]\nname = "a"', "sha256"),
        ('[[keys]]\nname = "a"\nsha256 = "secret"', "sha256"),
        (f'[[keys]]\nname = "a b"\nsha256 = "{"0" * 64}"', "name"),
        (f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\nrpm = 5', "rpm"),
        (f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\ntokens_per_minute = 0', ">= 1"),
        (f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\n' * 2, "name 'a' 2 times"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(KeyFileError, match=reason):
        Keyring(file=file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read"):
        Keyring(file=tmp_path / "none.toml")


def test_keys_are_found_by_their_hash(tmp_path: Path) -> None:
    file = written(tmp_path / "keys.toml", {"name": "a", "sha256": digest("one")})
    ring = Keyring("main", file)
    found = [
        ring.find(key, 0.0) for key in (b"one", b"main", b"other", b"", digest("one").encode())
    ]
    assert [tenant and tenant.name for tenant in found] == ["a", "default", None, None, None]
    assert found[0] is not None
    assert found[0].digest == hashlib.sha256(b"one").digest()
    assert not ring.is_open
    assert Keyring().is_open


def test_a_changed_file_is_read_again_and_use_stays_counted(tmp_path: Path) -> None:
    a = {"name": "a", "sha256": digest("one"), "requests_per_minute": 1}
    file = written(tmp_path / "keys.toml", a)
    ring = Keyring(file=file)
    tenant = ring.find(b"one", 0.0)
    assert tenant is not None
    with tenant.request(0.0):
        pass
    written(file, a | {"name": "renamed"}, {"name": "b", "sha256": digest("two")})
    os.utime(file, ns=(1, 1))
    assert ring.find(b"two", CHECK_SECONDS / 2) is None
    assert ring.find(b"two", CHECK_SECONDS) is not None
    assert ring.find(b"one", CHECK_SECONDS) is tenant
    assert tenant.name == "renamed"
    with pytest.raises(ApiError), tenant.request(CHECK_SECONDS):
        pass
    written(file, {"name": "b", "sha256": digest("two")})
    os.utime(file, ns=(2, 2))
    assert ring.find(b"one", 2 * CHECK_SECONDS) is None


def test_a_file_that_breaks_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path / "keys.json", {"name": "a", "sha256": digest("one")})
    ring = Keyring(file=file)
    file.write_text("{")
    os.utime(file, ns=(1, 1))
    assert ring.find(b"one", 10.0) is not None
    file.unlink()
    assert ring.find(b"one", 20.0) is not None
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "The keys stay as they were"
    ] * 2


def refused(tenant: Tenant, now: float) -> ApiError:
    with pytest.raises(ApiError) as caught, tenant.request(now):
        pass
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value


def test_requests_per_minute() -> None:
    tenant = Tenant(Terms("a", digest("one"), requests_per_minute=2))
    for _ in range(2):
        with tenant.request(0.0):
            pass
    assert refused(tenant, 0.0).retry_after == 30
    with tenant.request(30.0):
        pass


def test_tokens_per_minute_are_counted_when_they_are_known() -> None:
    tenant = Tenant(Terms("a", digest("one"), tokens_per_minute=60))
    with tenant.request(0.0):
        tenant.charge(100, 0.0)
        tenant.charge(9, 0.0)
    assert refused(tenant, 0.0).retry_after == 50
    with tenant.request(50.0):
        pass


def test_concurrent_requests() -> None:
    tenant = Tenant(Terms("a", digest("one"), concurrent_requests=2))
    with tenant.request(0.0), tenant.request(0.0):
        assert refused(tenant, 0.0).retry_after == 1
        assert tenant.open == 2
    assert tenant.open == 0
    with tenant.request(0.0):
        pass


def test_priority() -> None:
    tenant = Tenant(Terms("a", digest("one"), max_priority=0))
    tenant.check_priority(0)
    with pytest.raises(ApiError) as caught:
        tenant.check_priority(-1)
    assert (caught.value.status, caught.value.param) == (400, "priority")
    EVERYBODY.check_priority(-(2**31))
    assert EVERYBODY.digest is None


def pulse(epoch: int = 1, **elsewhere: TenantUse) -> Pulse:
    return Pulse(epoch, 1, 0, 0, 4096, [], False, elsewhere=elsewhere)


def limited(tmp_path: Path, **limits: int) -> tuple[Keyring, Tenant]:
    fields = {"name": "a", "sha256": digest("one"), **limits}
    keyring = Keyring(file=written(tmp_path / "keys.toml", fields))
    tenant = keyring.find(b"one", 0.0)
    assert tenant is not None
    return keyring, tenant


def may_ask(tenant: Tenant, now: float = 0.0) -> bool:
    try:
        with tenant.request(now):
            return True
    except ApiError:
        return False


def test_what_is_open_elsewhere_counts(tmp_path: Path) -> None:
    keyring, tenant = limited(tmp_path, concurrent_requests=2)
    keyring.learn(pulse(a=TenantUse(5, 50, 1)), 0.0)
    with tenant.request(0.0):
        assert not may_ask(tenant)
        keyring.learn(pulse(a=TenantUse(5, 50, 0)), 0.0)
        assert may_ask(tenant)


def test_what_is_used_elsewhere_is_used_up(tmp_path: Path) -> None:
    keyring, tenant = limited(tmp_path, requests_per_minute=6, tokens_per_minute=100)
    keyring.learn(pulse(a=TenantUse(50, 5000, 0)), 0.0)  # before this gateway began
    assert may_ask(tenant)
    for fits in (True, False):
        keyring.learn(pulse(a=TenantUse(54, 5001, 0)), 0.0)
        assert may_ask(tenant) is fits
    assert may_ask(tenant, now=10.0)
    keyring.learn(pulse(a=TenantUse(54, 5200, 0)), 10.0)
    assert not may_ask(tenant, now=50.0)
    assert keyring.used() == {"a": TenantUse(3, 0, 0)}


def test_a_scheduler_that_begins_anew_knows_only_what_is_used_since(tmp_path: Path) -> None:
    keyring, tenant = limited(tmp_path, requests_per_minute=3)
    keyring.learn(pulse(1, a=TenantUse(50, 0, 0)), 0.0)
    keyring.learn(pulse(2, a=TenantUse(2, 0, 0)), 0.0)
    assert may_ask(tenant)
    assert not may_ask(tenant)
    keyring.learn(pulse(3), 20.0)
    assert may_ask(tenant, 20.0)
