"""anthropic against a server: python anthropic_client.py URL MODEL

The server must have a parser of calls, and one of thoughts that stand behind a tag.
"""

import json
import sys
import urllib.request
from typing import Literal, get_args

import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from openai import OpenAI
from pydantic import BaseModel, TypeAdapter

URL, MODEL = sys.argv[1], sys.argv[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASKED = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


class Capital(BaseModel):
    """The capital of a country."""

    country: Literal["France", "Spain"]


def raw(**fields):
    """The body of an answer, as it came."""
    asked = {"model": MODEL, "max_tokens": 60, "temperature": 0, "messages": QUESTION}
    body = json.dumps({**asked, **fields}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/messages", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def create():
    answer = client.messages.create(**ASKED, messages=QUESTION, metadata={"user_id": "me"})
    (block,) = answer.content
    assert "Paris" in block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer._request_id is not None
    chat = OpenAI(base_url=f"{URL}/v1", api_key="none").chat.completions.create(
        **ASKED, messages=QUESTION
    )
    assert block.text == chat.choices[0].message.content
    usage = answer.usage
    assert usage.output_tokens == chat.usage.completion_tokens
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert total == chat.usage.prompt_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == total


def stream():
    whole = client.messages.create(**ASKED, messages=QUESTION)
    with client.messages.stream(**ASKED, messages=QUESTION) as events:
        text = "".join(events.text_stream)
        last = events.get_final_message()
    assert text == last.content[0].text == whole.content[0].text
    assert (last.stop_reason, last.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def conversation():
    said = [*QUESTION]
    answer = client.messages.create(**ASKED, messages=said, system="You are brief.")
    said += [answer.to_param(), {"role": "user", "content": "And of Italy?"}]
    cached = [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.create(**ASKED, messages=said, system=cached).content[0].text
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    assert client.messages.create(**ASKED, messages=begun).content[0].text.startswith(" Paris")


def stops():
    whole = client.messages.create(**ASKED, messages=QUESTION).content[0].text
    stop = whole[8:13]
    cut = client.messages.create(**ASKED, messages=QUESTION, stop_sequences=["zork", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole[: whole.index(stop)]
    short = client.messages.create(**{**ASKED, "max_tokens": 2}, messages=QUESTION)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)


def tools():
    said = [{"role": "user", "content": "What is the weather in Rome?"}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        **ASKED, messages=said, tools=[WEATHER], tool_choice=choice
    ) as events:
        answer = events.get_final_message()
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert call.input["city"] in ("Rome", "Paris")
    whole = client.messages.create(**ASKED, messages=said, tools=[WEATHER], tool_choice=choice)
    assert whole.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}
    said += [answer.to_param(), {"role": "user", "content": [result]}]
    again = client.messages.create(**ASKED, messages=said, tools=[WEATHER])
    assert again.content


def tool_runner():
    """It asks the server to keep the conversation, and sends all of it to one that does not."""
    told = []

    @anthropic.beta_tool
    def weather(city: Literal["Rome", "Paris"]) -> str:
        """The weather in a city.

        Args:
            city: Which.
        """
        told.append(city)
        return "Sunny, 21 degrees."

    said = [{"role": "user", "content": "What is the weather in Rome?"}]
    for stream in (False, True):
        runner = client.beta.messages.tool_runner(
            **ASKED,
            messages=said,
            tools=[weather],
            tool_choice={"type": "tool", "name": "weather"},
            max_iterations=2,
            stream=stream,
        )
        answers = [each.get_final_message() if stream else each for each in runner]
        assert [answer.stop_reason for answer in answers] == ["tool_use"] * 2
        first, second = (answer.usage for answer in answers)
        sizes = [use.input_tokens + use.cache_read_input_tokens for use in (first, second)]
        assert sizes[1] > sizes[0] + first.output_tokens
    assert len(told) == 4


def thinking():
    begun = [*QUESTION, {"role": "assistant", "content": "<think>I know that the capital"}]
    asked = {**ASKED, "messages": begun, "max_tokens": 12, "thinking": {"type": "adaptive"}}
    whole = client.messages.create(**asked)
    (block,) = whole.content
    assert block.type == "thinking"
    assert whole.usage.output_tokens_details.thinking_tokens == whole.usage.output_tokens
    with client.messages.stream(**asked) as events:
        thought = "".join(event.thinking for event in events if event.type == "thinking")
        (last,) = events.get_final_message().content
    assert thought == last.thinking == block.thinking
    assert last.signature == block.signature
    said = [*QUESTION, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}]
    said.append({"role": "user", "content": "Which?"})
    assert client.messages.create(**ASKED, messages=said).content


def structured():
    answer = client.messages.parse(**ASKED, messages=QUESTION, output_format=Capital)
    assert answer.parsed_output.country in ("France", "Spain")


def beta():
    answer = client.beta.messages.create(
        **ASKED,
        messages=QUESTION,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert "Paris" in answer.content[0].text


def raw_answers_are_of_the_types_of_the_client():
    events = {
        get_args(each.model_fields["type"].annotation)[0]: TypeAdapter(each)
        for each in get_args(get_args(RawMessageStreamEvent)[0])
    }
    for fields in ({}, {"tools": [WEATHER], "tool_choice": {"type": "any"}}):
        Message.model_validate_json(raw(**fields), strict=True)
        lines = raw(**fields, stream=True).split("\n")
        for line in lines:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                events[json.loads(data)["type"]].validate_json(data, strict=True)


def models():
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert client.models.retrieve(MODEL).created_at == model.created_at
    (model,) = OpenAI(base_url=f"{URL}/v1", api_key="none").models.list()
    assert model.id == MODEL


def errors():
    image = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    for fields, error, kind in (
        ({"extra_body": {"temperature": 3}}, *BAD),
        ({"model": "claude-0"}, anthropic.NotFoundError, "not_found_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, *BAD),
        ({"messages": [{"role": "user", "content": [image]}]}, *BAD),
    ):
        refused = None
        try:
            client.messages.create(**{**ASKED, "messages": QUESTION, **fields})
        except error as raised:
            refused = raised
        assert refused is not None, fields
        assert refused.type == kind
        assert refused.request_id == refused.body["request_id"]


BAD = (anthropic.BadRequestError, "invalid_request_error")
for check in (
    *(create, stream, conversation, stops, tools, tool_runner, thinking, structured, beta),
    *(raw_answers_are_of_the_types_of_the_client, models, errors),
):
    check()
    print(f"{check.__name__} passed")
