"""`client.responses` of the openai Python client against `pagefleet serve`."""

import json
import random
from collections.abc import Iterator
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from tests.system.serving import Serving
from tests.unit.gateway.openai_types import checked_event, checked_response

QUESTION = "What is the capital of France?"


class Capital(pydantic.BaseModel):
    country: Literal["France", "Spain"]
    founded: int


WEATHER = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_create(client: openai.OpenAI, server: Serving) -> None:
    answer = client.responses.create(
        model=server.model, input=QUESTION, temperature=0, metadata={"a": "b"}
    )
    assert "Paris" in answer.output_text
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.metadata == {"a": "b"}
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    chat = client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content
    assert usage.output_tokens == chat.usage.completion_tokens
    counted = client.responses.input_tokens.count(model=server.model, input=QUESTION)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage.input_tokens)


def test_a_conversation_is_sent_along(client: openai.OpenAI, server: Serving) -> None:
    said = [{"role": "user", "content": QUESTION}]
    answer = client.responses.create(model=server.model, input=said, temperature=0)
    said += [*answer.output, {"role": "user", "content": "And of Italy?"}]
    assert (
        "Rome" in client.responses.create(model=server.model, input=said, temperature=0).output_text
    )


def test_stream(client: openai.OpenAI, server: Serving) -> None:
    asked = {
        "model": server.model,
        "input": QUESTION,
        "max_output_tokens": 12,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "extra_body": {"seed": random.randrange(2**32)},
    }
    whole = client.responses.create(**asked)
    text, logprobs = "", []
    with client.responses.stream(**asked) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                logprobs += event.logprobs
                assert event.snapshot == text
    assert text == whole.output_text
    ((part,),) = [item.content for item in whole.output]
    assert [entry.logprob for entry in logprobs] == [entry.logprob for entry in part.logprobs]


def test_raw_answers_are_of_the_types_of_the_client(server: Serving) -> None:
    url = f"{server.url}/v1/responses"
    asked = {"input": QUESTION, "tools": [WEATHER], "tool_choice": "required", "seed": 1}
    answer = checked_response(httpx.post(url, json=asked, timeout=60).json())
    assert answer["output"][0]["type"] == "function_call"
    with httpx.stream("POST", url, json=asked | {"stream": True}, timeout=60) as response:
        data = [line for line in response.iter_lines() if line.startswith("data: ")]
    events = [checked_event(json.loads(line.removeprefix("data: "))) for line in data]
    assert events[-1]["response"]["output"][0]["arguments"] == answer["output"][0]["arguments"]


def test_parse(client: openai.OpenAI, server: Serving) -> None:
    asked = {"model": server.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    answer = client.responses.parse(**asked, text_format=Capital)
    assert answer.output_parsed.country in ("France", "Spain")
    with client.responses.stream(**asked, text_format=Capital) as stream:
        assert stream.until_done().get_final_response().output_parsed == answer.output_parsed


def test_tools_there_and_back(client: openai.OpenAI, server: Serving) -> None:
    said = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = {"model": server.model, "tools": [WEATHER], "temperature": 0, "max_output_tokens": 60}
    choice = {"type": "function", "name": "weather"}
    answer = client.responses.create(**asked, input=said, tool_choice=choice)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Paris")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    told = client.responses.create(**asked, input=[*said, call, output], tool_choice="none")
    assert told.output_text


def test_an_answer_that_is_cut(client: openai.OpenAI, server: Serving) -> None:
    answer = client.responses.create(model=server.model, input=QUESTION, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 2
    assert answer.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("wrong", "error", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-0"}, openai.NotFoundError, "model"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            openai.BadRequestError,
            "input[0].content[0]",
        ),
    ],
)
def test_errors(
    client: openai.OpenAI,
    server: Serving,
    wrong: dict[str, object],
    error: type[openai.APIStatusError],
    param: str,
) -> None:
    asked = {"model": server.model, "input": QUESTION, "max_output_tokens": 4} | wrong
    with pytest.raises(error) as raised:
        client.responses.create(**asked)
    assert raised.value.param == param


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            ask("resp_1")
