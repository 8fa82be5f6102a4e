"""Embeddings of whole cells: transformers' over HTTP, and the same bits whoever else is served."""

import base64
import random
from collections.abc import Callable

import httpx
import openai
import torch
import torch.nn.functional as F

from pagefleet.params import SamplingParams
from pagefleet.wire import unpack_floats
from tests.system.conftest import SMOLLM2, Case
from tests.system.serving import Serving

EMBEDDING = SamplingParams(max_tokens=0, seed=0, embedding=0)
GREEDY = SamplingParams(max_tokens=40, seed=0, temperature=0)


def test_equal_to_transformers_over_http(case: Callable[[str], Case], server: Serving) -> None:
    smollm2 = case(SMOLLM2)
    prompts = smollm2.prompts(4)
    print("prompts", prompts)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole, cut = (
            client.embeddings.create(model=server.model, input=prompts, dimensions=dimensions)
            for dimensions in (openai.omit, 64)
        )
    for prompt, entry, shorter in zip(prompts, whole.data, cut.data, strict=True):
        with torch.inference_mode():
            hidden = smollm2.oracle.model.base_model(torch.tensor([prompt])).last_hidden_state
        for found in (entry.embedding, shorter.embedding):
            expected = F.normalize(hidden[0, -1, : len(found)], dim=0)
            torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-4)
    assert [len(whole.data[0].embedding), len(cut.data[0].embedding)] == [576, 64]
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == sum(map(len, prompts))


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
    requests = []
    for prompt in prompts:
        tight.submit(random.choice(prompts), GREEDY)
        requests.append(tight.submit(prompt, EMBEDDING))
    tight.run()
    tight.assert_idle()
    assert [tight.clients[request].embedding for request in requests] == alone
    assert tight.planner.preemptions > 0
    assert tight.planner.prefix_hits > 0
