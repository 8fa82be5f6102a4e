"""`pagefleet chat` with a real cell whose gateway is killed in the middle of an answer."""

import os
import signal

import pytest

from benchmarks.drill.processes import children
from pagefleet_launcher.conversation import Chat, first_model
from tests.system.serving import pagefleet_serve


@pytest.fixture
def serving(tmp_path):
    options = ["--model=echo", "--engine=echo", "--step-seconds=0.02"]
    with pagefleet_serve(tmp_path, *options, XDG_CACHE_HOME=str(tmp_path)) as serving:
        yield serving


def test_an_answer_goes_on_when_its_gateway_is_killed(serving):
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 5}

    def talk():
        return Chat(serving.url, first_model(serving.url), options).ask("Once upon a time?")

    expected, pieces = "".join(talk()), []
    for piece in talk():
        pieces.append(piece)
        if len(pieces) == 10:
            services = children(serving.process.pid).items()
            os.kill(next(p for p, name in services if name == "gateway"), signal.SIGKILL)
    assert "".join(pieces) == expected
    assert len(expected) > 20
