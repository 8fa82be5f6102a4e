"""What of an answer is written where."""

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.cell.client import Mailbox
from pagefleet_gateway.http.app import build_gateway
from pagefleet_gateway.http.serving import Run, _written
from pagefleet_gateway.record import Record
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.requests.generation import Limits
from pagefleet_gateway.requests.understanding import understand_completion
from pagefleet_gateway.telemetry.metrics import RequestTimer
from tests.unit.gateway.served import echo_model


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        ({}, False),
        ({"stream": True}, False),
        ({"logprobs": 2}, True),
        ({"logprobs": 2, "stream": True}, False),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": 0, "stream": True}, True),
        ({"echo": True, "logprobs": 2, "stream": True}, True),
    ],
)
def test_many_logprobs_keep_no_other_stream_waiting(fields: dict[str, Any], beside: bool) -> None:
    """A million of them take 2.5 s to be written, which is not for the thread of the event loop."""
    body = json.dumps({"prompt": "ab"} | fields).encode()
    answer = Answer(understand_completion(body, echo_model(), Limits(4096)), echo_model())
    gateway = build_gateway(GatewaySettings(), echo_model())
    threads: list[int] = []

    def write(pieces: Mapping[int, Piece]) -> bytes:
        threads.append(threading.get_ident())
        return b"written"

    async def run() -> bytes:
        timer = RequestTimer(gateway.metrics, Record("r", 0.0), answer)
        return await _written(Run(gateway, answer, Mailbox(), timer), write, {})

    assert asyncio.run(run()) == b"written"
    assert (threads != [threading.get_ident()]) == beside
    gateway.threads.shutdown()
