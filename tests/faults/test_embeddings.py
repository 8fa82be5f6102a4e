"""Embeddings of many texts, while what computes or carries them is lost: all come, exact."""

import base64
import json
import random
import urllib.request

import pytest

from pagefleet_worker.simulated.echo_decoder import echo_embedding
from tests.faults.cell import PATIENCE
from tests.faults.proxy import Action

TEXTS = 40


@pytest.fixture
def prompts():
    seed = random.randrange(2**32)
    print("prompts of seed", seed)
    draw = random.Random(seed)
    common = draw.choices(range(256), k=60)
    return [
        common[: draw.randint(0, 60)] + draw.choices(range(256), k=draw.randint(1, 60))
        for _ in range(TEXTS)
    ]


def embedded(cell, prompts):
    """The embeddings of prompts, in one request."""
    body = json.dumps({"input": prompts, "encoding_format": "base64"}).encode()
    server = cell.server
    request = urllib.request.Request(f"http://{server.host}:{server.port}/v1/embeddings", body)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        entries = json.load(answer)["data"]
    assert [each["index"] for each in entries] == list(range(len(prompts)))
    return [base64.b64decode(each["embedding"]) for each in entries]


def kill_worker(cell):
    return "worker_proxy", lambda link: cell.worker_of(link).kill()


def restart_scheduler(cell):
    return "gateway_proxy", lambda link: cell.scheduler.restart()


def nothing_more(proxy):
    return lambda cell: (proxy, lambda link: None)


@pytest.mark.parametrize(
    ("tag", "number", "action", "fault"),
    [
        ("Plan", 3, Action.PASS, kill_worker),
        ("Result", 12, Action.PASS, kill_worker),
        ("Outputs", 5, Action.PASS, restart_scheduler),
        ("Outputs", 5, Action.DROP, nothing_more("gateway_proxy")),
        ("Result", 7, Action.DROP, nothing_more("worker_proxy")),
        ("Result", 7, Action.CORRUPT, nothing_more("worker_proxy")),
    ],
)
def test_all_come_exact(cell, prompts, tag, number, action, fault):
    proxy, strike = fault(cell)
    rule = getattr(cell, proxy).act(tag, action, first=number, call=strike)
    assert embedded(cell, prompts) == [echo_embedding(prompt) for prompt in prompts]
    assert rule.fired == 1
