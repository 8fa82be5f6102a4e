"""Each gateway is told what tenants used at the others, whatever gets lost or begins anew."""

import random

import pytest

from pagefleet.wire import MOST_USE, Pulse, TenantUse, decode_to_gateway, encode
from pagefleet_scheduler import usage as usage_module
from pagefleet_scheduler.usage import Usage


def test_each_is_told_of_all_others() -> None:
    usage = Usage()
    for gateway in (b"a", b"b", b"c"):
        usage.note(gateway, {})
    usage.note(b"a", {"t": TenantUse(2, 30, 1)})
    usage.note(b"b", {"t": TenantUse(1, 5, 1), "u": TenantUse(4, 7, 0)})
    assert usage.elsewhere(b"a") == {"t": TenantUse(1, 5, 1), "u": TenantUse(4, 7, 0)}
    assert usage.elsewhere(b"b") == {"t": TenantUse(2, 30, 1), "u": TenantUse(0, 0, 0)}
    assert usage.elsewhere(b"c") == {"t": TenantUse(3, 35, 2), "u": TenantUse(4, 7, 0)}


def test_what_was_counted_before_this_scheduler_is_not_counted_again() -> None:
    usage = Usage()
    usage.note(b"a", {"t": TenantUse(1000, 9000, 3)})
    usage.note(b"b", {})
    assert usage.elsewhere(b"b") == {"t": TenantUse(0, 0, 3)}
    usage.note(b"a", {"t": TenantUse(1001, 9010, 2)})
    assert usage.elsewhere(b"b") == {"t": TenantUse(1, 10, 2)}


def test_sums_are_of_what_was_used_since_the_first_beats() -> None:
    draw = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    usage, told = Usage(), {}
    truth = {gateway: [0, 0] for gateway in (b"a", b"b", b"c")}
    for gateway in truth:
        usage.note(gateway, {})
    for _ in range(300):
        gateway = draw.choice([*truth])
        truth[gateway][0] += draw.randrange(3)
        truth[gateway][1] += draw.randrange(50)
        if draw.random() < 0.6:  # else the beat is lost
            said = {"t": TenantUse(*truth[gateway], 0)}
            for _ in range(draw.randrange(1, 3)):
                usage.note(gateway, said)
                if draw.random() < 0.1:
                    usage.close(gateway)
            told[gateway] = said["t"]
        others = [told[other] for other in told if other != b"a"]
        if others and b"a" in told:
            expected = sum(each.requests for each in others), sum(each.tokens for each in others)
            seen = usage.elsewhere(b"a")["t"]
            assert (seen.requests, seen.tokens) == expected


def test_what_a_gateway_used_outlives_it_but_what_it_had_open_does_not() -> None:
    usage = Usage()
    usage.note(b"a", {})
    usage.note(b"b", {})
    usage.note(b"a", {"t": TenantUse(3, 4, 2)})
    usage.close(b"a")
    assert usage.elsewhere(b"b") == {"t": TenantUse(3, 4, 0)}


def test_a_gateway_that_comes_back_is_not_told_of_itself() -> None:
    """What it used would be taken from its tenants' allowances a second time, all at once."""
    usage = Usage()
    usage.note(b"a", {})
    usage.note(b"b", {})
    usage.note(b"a", {"t": TenantUse(1000, 9000, 2)})
    usage.close(b"a")
    usage.note(b"a", {"t": TenantUse(1001, 9010, 1)})
    assert usage.elsewhere(b"a") == {"t": TenantUse(0, 0, 0)}
    assert usage.elsewhere(b"b") == {"t": TenantUse(1001, 9010, 1)}


def test_gateways_that_stay_away_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "MOST_GATEWAYS", 4)
    usage = Usage()
    usage.note(b"lives", {})
    for number in range(20):
        gateway = b"%d" % number
        usage.note(gateway, {})
        usage.note(gateway, {"t": TenantUse(1, 1, 1)})
        usage.close(gateway)
        usage.note(b"lives", {"t": TenantUse(number, number, 1)})
    assert len(usage._said) == len(usage._counted) == 4
    assert usage.elsewhere(b"lives") == {"t": TenantUse(20, 20, 0)}


def test_what_no_gateway_could_have_used_can_still_be_told() -> None:
    usage = Usage()
    for gateway in (b"a", b"b", b"c"):
        usage.note(gateway, {})
    for _ in range(3000):
        for gateway in (b"a", b"b"):
            usage.note(gateway, {"t": TenantUse(MOST_USE, MOST_USE, MOST_USE)})
            usage.note(gateway, {})
    usage.note(b"a", {"t": TenantUse(0, 0, MOST_USE)})
    usage.note(b"b", {"t": TenantUse(0, 0, MOST_USE)})
    pulse = Pulse(1, 0, 0, 0, 0, [], False, elsewhere=usage.elsewhere(b"c"))
    assert decode_to_gateway(encode(pulse)) == pulse
    assert pulse.elsewhere["t"] == TenantUse(MOST_USE, MOST_USE, MOST_USE)
