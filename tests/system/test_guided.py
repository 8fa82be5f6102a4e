"""Structured output and tools through `pagefleet serve`, as OpenAI's SDK asks for them."""

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.system.serving import Serving, pagefleet_serve
from tests.system.test_serve import children

Short = Annotated[str, Field(max_length=12)]


class Address(BaseModel):
    street: Short
    number: Annotated[int, Field(ge=1, le=999)]


class Person(BaseModel):
    name: Short
    kind: Literal["friend", "foe"]
    homes: Annotated[list[Address], Field(min_length=1, max_length=2)]


class Weather(BaseModel):
    """Say what the weather will be."""

    city: Short
    days: Annotated[int, Field(ge=1, le=14)]


MESSAGES = [{"role": "user", "content": "Who is there?"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("guided")
    options = ["--model=echo", "--engine=echo", "--step-seconds=0.01", "--tool-call-parser=hermes"]
    with pagefleet_serve(folder, *options, XDG_CACHE_HOME=str(folder)) as serving:
        yield serving


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_sdk_parses_every_choice(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="echo", messages=MESSAGES, response_format=Person, n=3, seed=5
    )
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people)
    assert len({person.model_dump_json() for person in people}) > 1


def test_the_sdk_streams_a_required_call(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    with client.chat.completions.stream(model="echo", messages=MESSAGES, **fields) as stream:
        pieces = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert len(pieces) > 3
    whole = client.chat.completions.parse(model="echo", messages=MESSAGES, **fields)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.tool_calls[0].function == call.function


@pytest.mark.parametrize("begin", ["{", "<"])
def test_an_answer_has_the_form_that_is_asked_for_or_calls_a_tool(
    client: openai.OpenAI, begin: str
) -> None:
    answer = client.chat.completions.parse(
        model="echo",
        messages=MESSAGES,
        response_format=Person,
        tools=[openai.pydantic_function_tool(Weather)],
        logit_bias={str(ord(begin)): 50},
        n=3,
        seed=2,
    )
    for message in (choice.message for choice in answer.choices):
        if begin == "{":
            assert isinstance(message.parsed, Person)
            continue
        assert message.content is None
        assert message.tool_calls
        for call in message.tool_calls:
            assert isinstance(call.function.parsed_arguments, Weather)


def test_a_guided_stream_outlives_the_other_services(
    serving: Serving, client: openai.OpenAI
) -> None:
    pattern = r"([a-f]{4}-){12}end"
    fields = {
        "model": "echo",
        "prompt": "Once",
        "max_tokens": 100,
        "seed": 3,
        "extra_body": {"structured_outputs": {"regex": pattern}},
    }
    expected = client.completions.create(**fields).choices[0].text
    assert re.fullmatch(pattern, expected)
    before, pieces = children(serving), []
    for chunk in client.completions.create(**fields, stream=True):
        pieces.append(chunk.choices[0].text)
        if len(pieces) == 5:
            os.kill(before["worker"], signal.SIGKILL)
        if len(pieces) == 20:
            os.kill(before["scheduler"], signal.SIGKILL)
    assert "".join(pieces) == expected


def test_beams_obey_a_grammar(client: openai.OpenAI) -> None:
    pattern = r"[ab]{3}-[0-9]{2}"
    search = {"use_beam_search": True, "structured_outputs": {"regex": pattern}}
    answer = client.completions.create(
        model="echo", prompt="Once", max_tokens=20, n=3, extra_body=search
    )
    texts = [choice.text for choice in answer.choices]
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(set(texts)) > 1  # beams may differ in how they end, too


def test_a_bad_schema_names_its_field(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="echo", messages=MESSAGES, response_format=form)
    assert json.loads(caught.value.response.content)["error"]["param"] == "response_format"
