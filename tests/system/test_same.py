"""A stream says all that an answer in one piece says: every field, whatever is asked for; and chats
are what the openai package expects, whose types of completions are stricter than OpenAI's API.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.system.assembled import assembled, comparable
from tests.system.serving import Serving, pagefleet_serve

REQUESTS = 96
AT_ONCE = 16

Json = dict[str, Any]

TEXT = 'in the beginning <think> every process </think> owned é all 😀 of {"a": 1} memory'
WORDS = TEXT.split()
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "strict": True, "parameters": SCHEMA}},
]
LETTERS = [*range(97, 123)]

OF_ALL: list[Json] = [
    {"n": 3},
    {"stop": "e"},
    {"stop": ["th", " ", "a"], "include_stop_str_in_output": True},
    {"stop_token_ids": LETTERS[:6]},
    {"return_token_ids": True},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.3},
    {"logit_bias": {"101": 5, "32": -100}},
    {"ignore_eos": True},
    {"skip_special_tokens": False},
    {"prompt_logprobs": 2},
    {"return_tokens_as_token_ids": True},
    {"prediction": {"type": "content", "content": TEXT}},
    {"truncate_prompt_tokens": 5, "truncation_side": "right"},
]
OF_COMPLETIONS: list[Json] = [
    {"prompt": [WORDS[0], WORDS[1]]},
    {"prompt": [[1, 2, 3], [104, 105]]},
    {"logprobs": 3},
    {"logprobs": 0, "echo": True},
    {"echo": True, "max_tokens": 0},
    {"structured_outputs": {"regex": "[a-ce]{3,9}"}},
    {"use_beam_search": True, "n": 2, "beam_width": 3},
]
OF_CHATS: list[Json] = [
    {"logprobs": True, "top_logprobs": 2},
    {"tools": TOOLS, "tool_choice": "auto"},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"continue_final_message": True, "echo": True},
    {"include_reasoning": False},
]


def some_body(draw: random.Random, number: int) -> Json:
    """A completion or a chat with a few options; some do not go together and are a 400."""
    own, others = (OF_COMPLETIONS, OF_CHATS)[number % 2], draw.sample(OF_ALL, draw.randint(0, 4))
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
    role = draw.choice(["user", "assistant"])
    asked = {"prompt": text} if number % 2 == 0 else {"messages": [{"role": role, "content": text}]}
    body: Json = {
        **asked,
        "max_tokens": draw.randint(1, 40),
        "temperature": draw.choice([0, 0.7, 1.3]),
        "seed": draw.randrange(2**32),
        "request_id": f"r{number}",
    }
    for options in (*others, *draw.sample(own, draw.randint(0, 2))):
        body |= options
    return body


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Echoes, as a model that thinks and calls tools, and has a LoRA adapter."""
    options = ["--tool-call-parser=hermes", "--reasoning-parser=deepseek_r1", "--check"]
    folder = tmp_path_factory.mktemp("thinker")
    options.append(f"--lora-modules=sql={folder}")
    with pagefleet_serve(folder, "--model=echo", "--engine=echo", *options) as serving:
        yield serving


async def compare(client: httpx.AsyncClient, body: Json) -> bool:
    """Whether it was answered; what was not is refused alike, before or within the stream."""
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    whole = await client.post(route, json=body)
    stream = await client.post(route, json=body | streaming)
    if whole.status_code != 200:
        assert whole.status_code == 400, whole.text
        assert whole.text in stream.text, body
        return False
    *events, done, rest = stream.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.partition("data: ")[2]) for event in events]
    if "messages" in body:
        ChatCompletion.model_validate(whole.json(), strict=True)
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
    assert comparable(assembled(chunks)) == comparable(whole.json()), body
    return True


def test_streamed_and_whole_answers_are_the_same_in_every_field(thinker: Serving) -> None:
    draw = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    names = draw.choices(["echo", "sql"], k=REQUESTS)
    bodies = [some_body(draw, number) | {"model": name} for number, name in enumerate(names)]

    async def run() -> int:
        turns = asyncio.Semaphore(AT_ONCE)

        async def in_turn(body: Json) -> bool:
            async with turns:
                return await compare(client, body)

        async with httpx.AsyncClient(base_url=thinker.url, timeout=300) as client:
            return sum(await asyncio.gather(*map(in_turn, bodies)))

    answered = asyncio.run(run())
    print(answered, "of", REQUESTS, "were answered", end=" ")
    assert answered > REQUESTS // 2
