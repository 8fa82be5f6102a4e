"""Who listens at a Unix socket: one process, and one that is found, whatever files are deleted."""

import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from pagefleet.endpoint import EndpointError
from pagefleet.listening import TakenError
from pagefleet.transport import Hub, Peer
from tests.unit.shared.gated import wait_for

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the socket is, and nothing else."""
    folder = tmp_path / "cell"
    folder.mkdir(0o700)
    return folder


def delete_socket(folder: Path) -> None:
    (folder / "hub.sock").unlink()


def delete_files(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(context: Context, folder: Path) -> None:
    os.chown(folder, 12345, -1)
    with pytest.raises(EndpointError, match="belongs to another user"):
        Hub(f"ipc://{folder}/hub.sock", context)


def test_a_taken_address(context: Context, folder: Path) -> None:
    """Libzmq alone would take the address away from who listens there."""
    endpoint = f"ipc://{folder}/hub.sock"
    with closing(Hub(endpoint, context)) as first, closing(Peer(endpoint, context)) as peer:
        with pytest.raises(TakenError, match="another process listens there"):
            Hub(endpoint, context)
        assert wait_for(lambda: peer.send(b"hello"))
        assert wait_for(first.receive)


def test_of_two_that_start_at_once_one_is_refused(context: Context, folder: Path) -> None:
    def start(barrier: threading.Barrier, endpoint: str, hubs: list[Hub]) -> None:
        barrier.wait()
        try:
            hubs.append(Hub(endpoint, context))
        except TakenError:
            barrier.abort()

    for number in range(50):
        barrier, hubs = threading.Barrier(2), list[Hub]()
        told = barrier, f"ipc://{folder}/{number}.sock", hubs
        threads = [threading.Thread(target=start, args=told) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(hubs), barrier.broken) == (1, True)
        hubs[0].close()


def test_a_socket_whose_process_was_killed_is_not_taken(context: Context, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / "hub.sock"))
        killed.listen()
    endpoint = f"ipc://{folder}/hub.sock"
    with closing(Hub(endpoint, context)), closing(Peer(endpoint, context)) as peer:
        assert wait_for(lambda: peer.send(b"hello"))


@pytest.mark.parametrize("delete", [delete_socket, delete_files, shutil.rmtree])
def test_one_that_is_deleted_is_there_again(
    context: Context, folder: Path, caplog: pytest.LogCaptureFixture, delete: Callable[[Path], None]
) -> None:
    endpoints = [f"ipc://{folder}-kept/hub.sock", f"ipc://{folder}/hub.sock"]
    with ExitStack() as stack:
        hub = stack.enter_context(closing(Hub(endpoints, context)))
        early = [stack.enter_context(closing(Peer(each, context))) for each in endpoints]
        assert wait_for(lambda: all(peer.send(b"early") for peer in early))
        delete(folder)
        now = time.monotonic()
        hub.stay_found(now)
        hub.stay_found(now + 10)
        assert caplog.messages == [f"{endpoints[1]} was deleted; it is there again"]
        late = [stack.enter_context(closing(Peer(each, context))) for each in endpoints]
        assert wait_for(lambda: all(peer.send(b"late") for peer in late))
        assert all(peer.send(b"still") for peer in early)
        with pytest.raises(TakenError):
            Hub(endpoints[1], context)


def test_who_comes_while_the_socket_is_deleted_is_refused(context: Context, folder: Path) -> None:
    endpoint = f"ipc://{folder}/hub.sock"
    with closing(Hub(endpoint, context)):
        delete_socket(folder)
        with pytest.raises(TakenError):
            Hub(endpoint, context)


@pytest.mark.parametrize("delete", [delete_files, shutil.rmtree])
def test_who_was_robbed_of_the_lock_too_is_told(
    context: Context, folder: Path, delete: Callable[[Path], None]
) -> None:
    endpoint = f"ipc://{folder}/hub.sock"
    with closing(Hub(endpoint, context)) as robbed:
        delete(folder)
        with closing(Hub(endpoint, context)) as second:
            with pytest.raises(TakenError):
                robbed.stay_found(time.monotonic())
            second.stay_found(time.monotonic())
            with closing(Peer(endpoint, context)) as peer:
                assert wait_for(lambda: peer.send(b"hello"))
                assert wait_for(second.receive)


def test_what_somebody_left_there_meanwhile_is_replaced(context: Context, folder: Path) -> None:
    endpoint = f"ipc://{folder}/hub.sock"
    with closing(Hub(endpoint, context)) as hub:
        shutil.rmtree(folder)
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(folder / "hub.sock"))
        hub.stay_found(time.monotonic())
        with closing(Peer(endpoint, context)) as peer:
            assert wait_for(lambda: peer.send(b"hello"))


def test_one_that_cannot_be_found_again_says_so_and_goes_on(
    context: Context, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"ipc://{folder}/hub.sock"
    with closing(Hub(endpoint, context)) as hub, closing(Peer(endpoint, context)) as peer:
        assert wait_for(lambda: peer.send(b"early"))
        shutil.rmtree(folder)
        folder.write_text("in the way")
        now = time.monotonic()
        for after in (0, 10, 20):
            hub.stay_found(now + after)
        assert caplog.text.count("cannot be made") == 1
        assert peer.send(b"still")


def test_one_that_has_no_descriptor_left_says_so_and_is_found_later(
    context: Context, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"ipc://{folder}/hub.sock"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Hub(endpoint, context)) as hub:
        delete_socket(folder)
        now = time.monotonic()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            hub.stay_found(now)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert caplog.text.count("Too many open files") == 1
        hub.stay_found(now + 10)
        with closing(Peer(endpoint, context)) as peer:
            assert wait_for(lambda: peer.send(b"hello"))


def test_a_folder_that_cannot_be_made(context: Context) -> None:
    with pytest.raises(EndpointError, match="the folder /proc/cell cannot be made"):
        Hub("ipc:///proc/cell/hub.sock", context)


def test_a_folder_that_cannot_be_written_to(context: Context) -> None:
    with pytest.raises(EndpointError, match="cannot listen there: "):
        Hub("ipc:///proc/hub.sock", context)
