"""Where services meet: Unix sockets whose files are deleted, or that a second one lays claim to."""

import contextlib
import subprocess
import sys

from tests.faults.cell import Service, make_cell, wait_until
from tests.faults.conftest import Load, assert_exact, once


def test_files_of_sockets_that_are_deleted(tmp_path, echo_folder, questions):
    """Who is there stays, and who starts anew finds the way."""
    cell = make_cell(tmp_path, echo_folder, worker=["--step-seconds=0.01"])

    def delete():
        for proxy in cell.proxies:
            proxy.back.unlink()
        cell.workers[0].kill()

    with cell.running():
        watch = once(lambda answer: answer.tokens >= 10, delete)
        assert_exact(Load(questions).run(cell, watch))
        assert watch.struck
        wait_until(lambda: cell.scheduler.said("it is there again") == len(cell.proxies))
        cell.workers[0].restart()
        cell.gateways[0].restart()
        wait_until(lambda: cell.health()[1].get("workers") == len(cell.workers))
        assert_exact(Load(questions).run(cell))


def test_a_second_scheduler_takes_nothing_away(cell, questions):
    addresses = [f"--gateway-endpoint=ipc://{cell.gateway_proxy.back}"]
    second = [sys.executable, "-m", "pagefleet_scheduler", *addresses]
    ended = subprocess.run(second, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "another process listens there; end it, or choose another address" in ended.stderr
    cell.workers[0].kill()
    assert_exact(Load(questions).run(cell))


def test_a_second_scheduler_that_came_while_the_files_were_deleted(
    tmp_path, echo_folder, questions
):
    """It has the address, so the first one ends, and the streams go on."""
    cell = make_cell(tmp_path, echo_folder, worker=["--step-seconds=0.01"])
    first = cell.scheduler
    second = Service("scheduler", first.arguments, tmp_path / "second.log")

    def replace():
        with first.stopped():
            for proxy in cell.proxies:
                for file in proxy.back.parent.glob(f"{proxy.back.name}*"):
                    file.unlink()
            second.start()
            wait_until(lambda: second.said("listening"))

    with cell.running(), contextlib.ExitStack() as stack:
        stack.callback(second.end)
        watch = once(lambda answer: answer.tokens >= 10, replace)
        assert_exact(Load(questions).run(cell, watch))
        assert watch.struck
        wait_until(lambda: not first.alive)
        assert first.said("another process listens there")
        cell.scheduler = second
        assert_exact(Load(questions).run(cell))
