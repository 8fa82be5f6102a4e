"""Processes of `pagefleet serve` that are stopped for good, or replaced because somebody asks: no
stream is changed by it.
"""

import os
import signal
import threading
from types import SimpleNamespace

import httpx
import pytest

from benchmarks.drill.processes import children, is_alive
from benchmarks.drill.questions import Questioner
from benchmarks.loadgen.recording import Server
from tests.faults.cell import wait_until
from tests.faults.conftest import Load, assert_exact, once, rehearse
from tests.streams import read
from tests.system.serving import pagefleet_serve


@pytest.fixture
def served(tmp_path, echo_folder):
    """A cell whose launcher is quick to find who hangs."""
    options = [f"--model={echo_folder}", "--engine=echo", "--step-seconds=0.02", "--check"]
    with pagefleet_serve(tmp_path, *options, "--hang-timeout=2") as serving:
        yield SimpleNamespace(serving=serving, servers=[Server.at(serving.url)])


def stop(served, name):
    """SIGSTOP the process of a service; its pid."""
    services = children(served.serving.process.pid).items()
    pid = next(pid for pid, service in services if service == name)
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize("name", ["scheduler", "worker"])
def test_a_service_hangs_under_load(served, questions, name):
    stopped = []
    watch = once(lambda answer: answer.tokens >= 10, lambda: stopped.append(stop(served, name)))
    assert_exact(Load(questions, tokens=60).run(served, watch))
    assert watch.struck
    wait_until(lambda: not is_alive(stopped[0]))
    assert served.serving.log.read_text().count("hangs: no sign of life for 2 s") == 1


def test_a_gateway_hangs_in_the_middle_of_a_stream(served, questions):
    """Its client is cut off when it is killed, and goes on at its successor."""
    question = questions.ask("n=2", 40, 60)
    stopped = []

    def stop_in_the_middle(count, *_):
        if count >= 20 and not stopped:
            stopped.append(stop(served, "gateway"))

    first, last_id, ended = read(served.servers[0], question, watch=stop_in_the_middle)
    assert not ended
    rest, _, ended = read(served.servers[0], question, last_id)
    assert ended
    assert [first[index] + rest[index] for index in range(question.choices)] == question.expected


@pytest.mark.parametrize("bound", ["--num-blocks=4", "--max-model-len=64"])
def test_an_answer_is_as_long_as_fits_though_worker_or_gateway_is_new(tmp_path, echo_folder, bound):
    """While there is no worker, and as the first that a gateway is asked for."""
    options = [f"--model={echo_folder}", "--engine=echo", "--block-size=16", "--check"]
    with pagefleet_serve(tmp_path, *options, bound) as serving:
        chat = f"{serving.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}

        def kill(name):
            services = children(serving.process.pid).items()
            os.kill(next(pid for pid, service in services if service == name), signal.SIGKILL)

        answers = [httpx.post(chat, json=body)]
        kill("worker")
        wait_until(lambda: httpx.get(f"{serving.url}/health").status_code == 503)
        answers.append(httpx.post(chat, json=body, timeout=60))
        kill("gateway")
        wait_until(lambda: "gateway" not in children(serving.process.pid).values())
        for cut in ({}, {"truncate_prompt_tokens": -1}):
            answers.append(httpx.post(chat, json=body | cut, timeout=60))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.json()["usage"]["total_tokens"] for answer in answers} == {64}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scheduler", "worker", "gateway"])
def test_who_stops_for_less_than_the_limit_is_left_alone(served, questions, name):
    before = children(served.serving.process.pid)

    def pause():
        pid = stop(served, name)
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()

    watch = once(lambda answer: answer.tokens >= 10, pause)
    answers = Load(questions, tokens=60).run(served, watch)
    assert_exact(answers)
    assert max(answer.longest_gap for answer in answers) > 0.5
    assert children(served.serving.process.pid) == before


@pytest.mark.slow
def test_a_real_model_is_served_on_while_all_processes_are_replaced(tmp_path, smollm2):
    load = Load(Questioner(smollm2, 1), prompt=20, tokens=24)
    with pagefleet_serve(tmp_path, f"--model={smollm2}", "--check") as serving:
        served = SimpleNamespace(servers=[Server.at(serving.url)])
        rehearse(served, load)
        before = children(serving.process.pid)
        serving.process.send_signal(signal.SIGHUP)
        while "serve | all processes are replaced" not in serving.log.read_text():
            assert_exact(load.run(served))
        assert not before.keys() & children(serving.process.pid).keys()
