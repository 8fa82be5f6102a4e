"""Gateways that have one cell's key resume each other's streams, and none of another cell."""

from pathlib import Path

from pagefleet.cell_key import make
from pagefleet.settings import GatewaySettings
from pagefleet_gateway.http.app import build_gateway
from tests.unit.gateway.served import echo_model


def secret(**told: str | None) -> bytes:
    return build_gateway(GatewaySettings(**told), echo_model()).resume_secret


def test_a_key_makes_the_secret_that_ids_are_signed_with(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("here", "other")]
    for file in files:
        make(file)
    here, other = (secret(cell_key=file) for file in files)
    assert here == secret(cell_key=files[0])
    assert len({here, other, secret(), secret()}) == 4


def test_one_that_is_named_is_taken(tmp_path: Path) -> None:
    make(tmp_path / "key")
    assert secret(cell_key=str(tmp_path / "key"), resume_secret="ours") == b"ours"
