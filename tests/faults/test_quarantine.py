"""A request that ends whatever computes it is refused, and nobody else notices."""

import asyncio
import json

from benchmarks.drill.streams import REFUSED, ask
from pagefleet.wire import pack_ints
from tests.faults.cell import wait_until
from tests.faults.conftest import Load, assert_exact
from tests.faults.proxy import Action


def test_a_poison_ends_three_workers_at_most(cell, questions):
    poison = questions.ask("greedy", 40, 20)
    prompt = pack_ints(poison.prompt)
    killed, answers = [], []

    def kill(link):
        """The worker that is told of the poison, which starts again."""
        worker = cell.worker_of(link)
        killed.append(worker.name)
        worker.restart()

    async def ask_poison():
        await asyncio.sleep(0.1)
        answers.append(await ask(cell.server, poison))

    cell.worker_proxy.act(
        "Plan", Action.PASS, share=1.0, holds=lambda frame: prompt in frame, call=kill
    )
    assert_exact(Load(questions, tokens=200).run(cell, also=ask_poison()))
    assert len(killed) == 3
    (answer,) = answers
    assert answer.verdict == REFUSED
    status, _, body = answer.error.partition(": ")
    assert status == "HTTP 500"
    assert json.loads(body)["error"]["code"] == "request_quarantined"
    assert wait_until(lambda: cell.total("pagefleet_quarantines_total"))
