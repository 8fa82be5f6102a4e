"""Embeddings of whole cells: the same in both encodings, and to the bit whoever else is served.

That they are transformers' is in test_greedy.py, beside the model that says so.
"""

import base64
import random
from collections.abc import Callable

import httpx

from pagefleet.params import SamplingParams
from pagefleet.wire import unpack_floats
from tests.system.conftest import Case
from tests.system.serving import Serving

EMBEDDING = SamplingParams(max_tokens=0, seed=0, embedding=0)
GREEDY = SamplingParams(max_tokens=40, seed=0, temperature=0)


def test_both_encodings_are_the_same_numbers(server: Serving) -> None:
    asked = {"input": ["A page of memory.", "Une page de mémoire."]}
    numbers, bytes_ = (
        httpx.post(
            f"{server.url}/v1/embeddings", json=asked | {"encoding_format": form}, timeout=60
        ).json()["data"]
        for form in ("float", "base64")
    )
    for left, right in zip(numbers, bytes_, strict=True):
        assert left["embedding"] == unpack_floats(base64.b64decode(right["embedding"])).tolist()


def test_the_same_bits_in_a_cell_that_preempts(case: Callable[[str], Case]) -> None:
    qwen3 = case("qwen3")
    prompts = qwen3.prompts(16)
    print("prompts", prompts)
    roomy = qwen3.model.cell(lookahead=False, caching=False)
    alone = []
    for prompt in prompts:
        request = roomy.submit(prompt, EMBEDDING)
        roomy.run()
        alone.append(roomy.clients[request].embedding)
    assert None not in alone
    tight = qwen3.model.cell(budget=16, blocks=14, slots=8)
    tight.press()
    requests = []
    for prompt in prompts:
        tight.submit(random.choice(prompts), GREEDY)
        requests.append(tight.submit(prompt, EMBEDDING))
    tight.run()
    tight.assert_idle()
    assert [tight.clients[request].embedding for request in requests] == alone
    assert tight.planner.preemptions > 0
    assert tight.planner.prefix_hits > 0
