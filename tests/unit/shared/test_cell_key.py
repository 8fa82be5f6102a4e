"""The file of a cell's key: made once, read by nobody else, refused with a sentence."""

import os
from pathlib import Path

import pytest

from pagefleet.cell_key import CellKey, CellKeyError, make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    make(tmp_path / "key")
    return tmp_path / "key"


def test_a_file_holds_one_key_and_another_file_another(file: Path, tmp_path: Path) -> None:
    make(tmp_path / "other")
    key, other = CellKey.load(file), CellKey.load(tmp_path / "other")
    assert key == CellKey.load(file)
    keys = {each.hub for each in (key, other)} | {each.peer for each in (key, other)}
    assert len(keys | {key.resumption, other.resumption}) == 6


def test_it_is_not_shown(file: Path) -> None:
    secret = file.read_text().split()[-1]
    assert secret not in repr(CellKey.load(file))
    assert str(bytes.fromhex(secret)) not in repr(CellKey.load(file))


def test_a_file_is_made_for_its_user_alone_and_never_over_another(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    with pytest.raises(CellKeyError, match="exists and is left as it is"):
        make(file)
    assert file.read_bytes() == before
    with pytest.raises(CellKeyError, match="cannot be written: Not a directory"):
        make(file / "key")


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o660, 0o644, 0o601])
def test_one_that_others_can_get_at_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(CellKeyError, match=f"chmod 600 {file}"):
        CellKey.load(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_group_may_read_what_is_root_s_and_nothing_else(file: Path) -> None:
    file.chmod(0o640)
    CellKey.load(file)
    os.chown(file, 12345, -1)
    with pytest.raises(CellKeyError, match="chmod 600"):
        CellKey.load(file)


@pytest.mark.parametrize("content", ["", "secret\n", "pagefleet cell key abcd\n", "\0" * 100])
def test_what_is_no_key_is_refused(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(CellKeyError, match="is no key of a cell; pagefleet keygen FILE makes one"):
        CellKey.load(file)


def test_one_with_something_behind_it_is_refused(file: Path) -> None:
    file.write_text(file.read_text() * 2)
    with pytest.raises(CellKeyError, match="is no key"):
        CellKey.load(file)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CellKeyError, match="No such file or directory; copy it from another"):
        CellKey.load(tmp_path / "key")
