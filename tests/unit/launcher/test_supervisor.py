import asyncio
import os
import re
import resource
import signal
import socket
import time

import pytest

from benchmarks.drill.processes import is_alive
from pagefleet_launcher.child import Child, Service, next_pause
from tests.unit.launcher.conftest import wait_until

ENDING = "      serve | ending, once open streams have ended; Ctrl-C ends it at once\n"


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_long_life():
    pauses = [0.0]
    for _ in range(7):
        pauses.append(next_pause(pauses[-1], lived=1.0))
    assert pauses[1:] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert next_pause(5.0, lived=30.0) == 0.2


def test_a_child_that_exits_is_started_again_after_growing_pauses(cell):
    cell.start({"worker": "crash"})
    third = cell.wait_for("worker", "started", count=3)
    first, second = cell.events("worker", "started")[:2]
    assert second.time - first.time >= 0.2
    assert third.time - second.time >= 0.4
    assert len({first.pid, second.pid, third.pid}) == 3
    cell.signal()
    status, errors = cell.end()
    assert status == 0
    assert "serve | worker exited with status 3; it starts again in 0.2 s" in errors
    assert "serve | worker exited with status 3; it starts again in 0.4 s" in errors


def test_a_killed_child_is_started_again_and_the_others_live_on(cell):
    cell.start({"scheduler": "serve"}, {"worker": "serve"})
    os.kill(cell.wait_for("worker", "started").pid, signal.SIGKILL)
    cell.wait_for("worker", "started", count=2)
    assert len(cell.events("scheduler", "started")) == 1
    cell.signal()
    status, errors = cell.end()
    assert status == 0
    assert "worker was killed by SIGKILL; it starts again in 0.2 s" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_the_last_stage_first(cell, number):
    cell.start(
        {"scheduler": "serve"}, {"worker-0": "serve", "worker-1": "serve"}, {"gateway": "serve"}
    )
    cell.signal(number)
    assert cell.end() == (0, ENDING)
    order = [(e.name, e.what) for e in cell.events() if e.what != "started"]
    assert order[:2] == [("gateway", "asked"), ("gateway", "ended")]
    assert {name for name, _ in order[2:6]} == {"worker-0", "worker-1"}
    assert order[6:] == [("scheduler", "asked"), ("scheduler", "ended")]


def test_a_child_is_kept_alive_while_a_later_stage_drains(cell):
    cell.start({"worker": "serve"}, {"gateway": "stubborn"}, drain_timeout=60)
    cell.signal()
    cell.wait_for("gateway", "asked")
    os.kill(cell.wait_for("worker", "started").pid, signal.SIGKILL)
    cell.wait_for("worker", "started", count=2)
    cell.signal(signal.SIGINT)
    assert cell.end()[0] == 1


def test_what_does_not_end_in_time_is_killed(cell):
    cell.start({"worker": "stubborn"}, drain_timeout=0.3)
    cell.signal()
    status, errors = cell.end()
    assert status == 1
    assert "serve | worker has not ended; it is killed" in errors
    assert not cell.alive()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_draining_kills_at_once(cell, first):
    cell.start({"scheduler": "serve"}, {"gateway": "stubborn"}, drain_timeout=60)
    cell.signal(first)
    cell.wait_for("gateway", "asked")
    began = time.monotonic()
    cell.signal(signal.SIGINT)
    assert cell.end()[0] == 1
    assert time.monotonic() - began < 30
    assert not cell.alive()


def test_a_second_sigterm_changes_nothing(cell):
    cell.start({"gateway": "slow"})
    cell.signal(signal.SIGTERM)
    cell.wait_for("gateway", "asked")
    cell.signal(signal.SIGTERM)
    assert cell.end() == (0, ENDING)
    assert [event.what for event in cell.events()] == ["started", "asked", "ended"]


def test_a_signal_during_a_pause_ends_the_child_for_good(cell):
    cell.start({"worker": "crash"})
    cell.wait_for("worker", "started", count=3)
    wait_until(lambda: not cell.alive())
    cell.signal()
    assert cell.end()[0] == 0
    assert len(cell.events("worker", "started")) == 3


def test_a_child_that_refuses_its_settings_ends_all(cell):
    cell.start({"scheduler": "serve"}, {"worker": "refuse"})
    status, errors = cell.end()
    assert status == 2
    assert "worker refuses its settings" in errors
    assert len(cell.events("worker", "started")) == 1
    assert cell.events("scheduler", "ended")


def test_a_child_that_refuses_settings_it_was_ready_with_is_started_again(cell):
    """Then it is not the settings that are wrong."""

    async def scenario():
        child = Child(Service("worker", cell.command("worker", "once:2")))
        living = asyncio.create_task(child.keep_alive())
        await child.ready.wait()
        os.kill(cell.wait_for("worker", "started").pid, signal.SIGKILL)
        await asyncio.to_thread(cell.wait_for, "worker", "started", 4)
        child.stop()
        return await living

    assert asyncio.run(scenario())


def test_a_child_that_cannot_be_started_is_tried_again(cell):
    """A limit of descriptors stands for all that the system may run out of for a while."""
    cell.start({"scheduler": "serve"}, {"worker": "serve"})
    pid, born = cell.process.pid, cell.wait_for("worker", "started").pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    os.kill(born, signal.SIGKILL)
    assert any("worker cannot be started (Too many open files)" in line for line in cell.heard())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    cell.wait_for("worker", "started", count=2)
    cell.signal()
    assert cell.end()[0] == 0


def test_no_child_outlives_a_killed_supervisor(cell):
    cell.start({"scheduler": "serve"}, {"worker": "stubborn"}, {"gateway": "stubborn"})
    assert len(cell.alive()) == 3
    cell.signal(signal.SIGKILL)
    wait_until(lambda: not cell.alive())


def test_what_a_dead_child_had_started_is_ended_before_its_next_start(cell):
    cell.start({"worker": "parent"})
    born = cell.wait_for("worker-child", "started")
    os.kill(cell.wait_for("worker", "started").pid, signal.SIGKILL)
    cell.wait_for("worker", "started", count=2)
    assert not is_alive(born.pid)


def test_children_do_not_share_the_terminal_s_process_group(cell):
    cell.start({"scheduler": "serve"}, {"worker": "serve"})
    for event in cell.events():
        assert os.getpgid(event.pid) == event.pid


def test_what_children_write_is_passed_on_with_their_names(cell):
    cell.start({"worker": "talk"})
    cell.wait_for("worker", "started", count=2)
    cell.signal()
    errors = cell.end()[1]
    first_life = errors.splitlines()[:5]
    assert [re.sub(r"^ +", "", line) for line in first_life] == [
        "worker | first",
        "worker | second \ufffd",
        "worker | on standard error",
        "worker | unfinished",
        "serve | worker exited with status 3; it starts again in 0.2 s",
    ]


def test_a_reader_that_stops_or_is_gone_keeps_no_child_from_its_next_start(cell):
    cell.start({"worker": "flood"}, {"scheduler": "serve"})
    os.kill(cell.wait_for("scheduler", "started").pid, signal.SIGKILL)
    second = cell.wait_for("scheduler", "started", count=2)
    cell.process.stderr.close()
    os.kill(second.pid, signal.SIGKILL)
    third = cell.wait_for("scheduler", "started", count=3)
    cell.signal()
    assert cell.process.wait(timeout=20) == 0
    assert not is_alive(third.pid)


def test_connections_wait_while_the_child_that_answers_them_starts_again(cell):
    def ask(address):
        with socket.create_connection(address, timeout=20) as connection:
            return int(connection.recv(100))

    async def scenario(listener):
        fd = listener.fileno()
        child = Child(Service("gateway", cell.command("gateway", f"listen:{fd}"), fds=[fd]))
        living = asyncio.create_task(child.keep_alive())
        first = await asyncio.to_thread(ask, listener.getsockname())
        os.kill(first, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not is_alive(first))
        second = await asyncio.to_thread(ask, listener.getsockname())
        child.kill()
        await living
        return first, second

    with socket.create_server(("127.0.0.1", 0)) as listener:
        first, second = asyncio.run(scenario(listener))
    assert [event.pid for event in cell.events("gateway", "started")] == [first, second]
