"""The cell that the short tests share: it is whole again, and holds nothing, after each of them."""

import asyncio
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.drill.questions import SAMPLED, Questioner
from benchmarks.drill.streams import EXACT, ask
from pagefleet_worker.prepare import prepare
from tests.faults.cell import PATIENCE, make_cell
from tests.faults.proxy import Action

STEP_SECONDS = 0.01
CHUNK = 32
"""Tokens that one step may hold, so that a prompt takes several."""
BLOCKS = 512
"""Of a worker: the scheduler looks at all of them at every step."""


@pytest.fixture(scope="session")
def echo_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    return prepare("echo", folder, adapters={"one": str(folder), "two": str(folder)})


@pytest.fixture(scope="package")
def shared_cell(tmp_path_factory, echo_folder):
    cell = make_cell(
        tmp_path_factory.mktemp("cell"),
        echo_folder,
        gateways=2,
        worker=[
            *(f"--step-seconds={STEP_SECONDS}", f"--max-num-batched-tokens={CHUNK}"),
            f"--num-blocks={BLOCKS}",
        ],
        seed=random.randrange(2**32),
    )
    with cell.running():
        yield cell


@pytest.fixture
def cell(shared_cell):
    yield shared_cell
    shared_cell.settle()


@pytest.fixture
def questions(echo_folder) -> Questioner:
    seed = random.randrange(2**32)
    print("questions of seed", seed)
    return Questioner(echo_folder, seed)


class Load:
    """Questions that are asked together, one of each form by default."""

    def __init__(self, questions, *, prompt=40, tokens=40, forms=SAMPLED, stream=True):
        self.questions = [
            questions.ask(form, prompt, tokens, stream=stream or index % 2 == 0)
            for index, form in enumerate(forms)
        ]

    def run(self, cell, watch=lambda answer: None, also=None, gateway=0):
        """Ask all at once, and the answers in the end; `also` is a coroutine to run beside."""

        async def run():
            server = cell.servers[gateway]
            asked = [ask(server, question, watch) for question in self.questions]
            answers, _ = await asyncio.gather(asyncio.gather(*asked), also or asyncio.sleep(0))
            return answers

        return asyncio.run(run())


def rehearse(cell, load):
    """Take what comes without faults for what has to come, where no oracle knows it."""
    for number, answer in enumerate(load.run(cell)):
        assert answer.whole
        known = [answer.choices[index] for index in range(answer.question.choices)]
        load.questions[number] = replace(answer.question, known=known)


def assert_exact(answers):
    """Every answer is the oracle's, token for token, and none saw an error."""
    assert [(a.question.form, a.verdict, a.error) for a in answers] == [
        (a.question.form, EXACT, None) for a in answers
    ]


def once(condition, act):
    """A watch of streams that acts once, at the first answer for which the condition holds."""
    struck = []

    def watch(answer):
        if not struck and condition(answer):
            struck.append(answer)
            act()

    watch.struck = struck
    return watch


def kill_gateway_at(cell, number):
    """Kill the first gateway in the place of its outputs of this number, whatever its client has
    read of those before, which is something; returns the watch of that client.
    """
    has_some = threading.Event()

    def kill(link):
        has_some.wait(PATIENCE)
        cell.gateways[0].kill()

    cell.gateway_proxy.act("Outputs", Action.DROP, first=number, call=kill)
    return lambda *_: has_some.set()
