"""A stream goes on at another gateway after its own was killed: nothing lost, nothing repeated."""

import json
from collections import defaultdict
from contextlib import suppress

import httpx
import pytest

from benchmarks.drill.questions import SAMPLED
from tests.faults.conftest import STEP_SECONDS


def read(server, question, last_id=None, watch=lambda tokens: None):
    """Tokens of each choice until the stream ends or breaks, its last id, and whether it ended."""
    tokens, ended = defaultdict(list), False
    url = f"http://{server.host}:{server.port}/v1/completions"
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with (
        suppress(httpx.RemoteProtocolError, httpx.ReadError),
        httpx.stream("POST", url, content=question.body, headers=headers, timeout=60) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            name, _, content = line.partition(": ")
            if name == "id":
                last_id = content
            elif name == "data":
                ended = content == "[DONE]"
                for choice in [] if ended else json.loads(content)["choices"]:
                    tokens[choice["index"]] += choice["token_ids"]
                    watch(sum(map(len, tokens.values())))
    return tokens, last_id, ended


@pytest.mark.parametrize("form", SAMPLED)
def test_a_stream_goes_on_at_another_gateway(cell, questions, form):
    question = questions.ask(form, 40, 40)
    assert question.max_tokens * STEP_SECONDS > 0.2

    def kill_in_the_middle(count):
        if count >= 10 and cell.gateways[0].alive:
            cell.gateways[0].kill()

    first, last_id, ended = read(cell.servers[0], question, watch=kill_in_the_middle)
    assert not ended
    rest, _, ended = read(cell.servers[1], question, last_id)
    assert ended
    cell.gateways[0].restart()
    assert [first[index] + rest[index] for index in range(question.choices)] == question.expected
