"""A gateway that is asked twice to end: it ends at once, and tells everybody who waits."""

import signal
import socket

from tests.faults.cell import make_cell
from tests.faults.conftest import Load, once

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: 1000\r\n\r\n{"


def test_open_streams_end_with_an_error(tmp_path, echo_folder, questions):
    cell = make_cell(tmp_path, echo_folder, workers=1, worker=["--step-seconds=0.01"])
    gateway = cell.gateways[0]

    def end():
        for number in (signal.SIGTERM, signal.SIGINT):
            gateway.send(number)

    with cell.running():
        server = cell.server
        with socket.create_connection((server.host, server.port)) as slow:
            slow.sendall(HALF)
            watch = once(lambda answer: answer.tokens >= 10, end)
            answers = Load(questions, tokens=500, stream=False).run(cell, watch)
            assert watch.struck
            assert gateway.wait() == 0
    for answer in answers:
        assert "shutting down" in answer.error
        assert answer.whole == answer.question.stream
    assert not gateway.said("Traceback")
    assert gateway.said("error=overloaded") == len(answers)
