import os
import stat
import subprocess
import sys

import pytest

from pagefleet_launcher.folder import PREFIX, private_folder
from tests.processes import killed_in_the_end

MAKER = """
import os, pathlib, signal, socket, sys
from pagefleet_launcher.folder import private_folder
with private_folder(pathlib.Path(sys.argv[1])) as folder:
    os.chdir(folder)  # whose path may be too long for a socket
    socket.socket(socket.AF_UNIX).bind("gateways.sock")
    (folder / "gateways.sock.lock").touch()
    print(folder, flush=True)
    signal.pause()
"""


@pytest.fixture
def maker(tmp_path):
    """A process that has made a folder in `tmp_path`."""
    command = [sys.executable, "-c", MAKER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with killed_in_the_end(
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    ) as process:
        yield process


def test_a_folder_is_private_and_goes_in_the_end(tmp_path):
    with private_folder(tmp_path) as folder, private_folder(tmp_path) as another:
        assert folder.parent == another.parent == tmp_path
        assert folder != another
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "gateways.sock").touch()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_leaves_goes_with_the_next(tmp_path, maker):
    left = maker.stdout.readline().strip()
    with private_folder(tmp_path) as while_it_lives:
        assert {str(path) for path in tmp_path.iterdir()} == {left, str(while_it_lives)}
    maker.kill()
    maker.wait()
    assert sorted(os.listdir(left)) == ["gateways.sock", "gateways.sock.lock"]
    with private_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_folders_of_others_are_left_alone(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base = tmp_path / "base"
    base.mkdir()
    (base / f"{PREFIX}link").symlink_to(elsewhere)
    (base / f"{PREFIX}file").touch()
    (base / "pagefleet-1000").mkdir()
    logs = base / f"{PREFIX}logs"
    logs.mkdir()
    (logs / "today.lock").touch()
    (logs / "today").write_text("what a user keeps")
    before = set(base.iterdir())
    with private_folder(base):
        pass
    (base / f"{PREFIX}another-user").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with private_folder(base):
        pass
    assert set(base.iterdir()) == {*before, base / f"{PREFIX}another-user"}
    assert elsewhere.exists()
    assert sorted(os.listdir(logs)) == ["today", "today.lock"]
