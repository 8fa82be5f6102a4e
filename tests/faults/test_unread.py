"""Logs that nobody reads: their pipes are full, and whoever writes to one waits for ever."""

import contextlib
import os

from tests.faults.cell import make_cell
from tests.faults.conftest import Load, assert_exact


def full_pipe(path):
    """A pipe at `path` that takes nothing more, as long as what is returned is not read."""
    os.mkfifo(path)
    pipe = os.fdopen(os.open(path, os.O_RDWR | os.O_NONBLOCK), "wb", buffering=0)
    while pipe.write(bytes(4096)):
        pass
    return pipe


def test_services_whose_logs_nobody_reads(tmp_path, echo_folder, questions):
    cell = make_cell(tmp_path, echo_folder)
    with contextlib.ExitStack() as stack:
        for service in cell.services:
            stack.enter_context(full_pipe(service.log))
        with cell.running():
            assert_exact(Load(questions).run(cell))
            for service in cell.services:
                service.leave()
