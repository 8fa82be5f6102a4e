"""openai-agents against a server: python agents_client.py URL MODEL"""

import asyncio
import sys
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

URL, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
asked = []


class Capital(BaseModel):
    """The capital of a country."""

    country: Literal["France", "Spain"]


@function_tool
def weather(city: Literal["Rome", "Paris"]) -> str:
    """The weather in a city."""
    asked.append(city)
    return "Sunny, 21 degrees."


def agent(**fields):
    settings = {"temperature": 0, "max_tokens": 100} | fields.pop("settings", {})
    client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    return Agent(
        name="guide",
        model=OpenAIResponsesModel(model=MODEL, openai_client=client),
        model_settings=ModelSettings(**settings),
        **fields,
    )


async def run():
    result = await Runner.run(agent(), "What is the capital of France?")
    assert "Paris" in result.final_output
    said = [*result.to_input_list(), {"role": "user", "content": "And of Italy?"}]
    assert "Rome" in (await Runner.run(agent(), said)).final_output


async def tools():
    guide = agent(tools=[weather], settings={"tool_choice": "required"})
    result = await Runner.run(guide, "What is the weather in Rome?")
    assert asked.pop() in ("Rome", "Paris")
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]


async def stream():
    guide = agent(tools=[weather], settings={"tool_choice": "required"})
    result = Runner.run_streamed(guide, "What is the weather in Rome?")
    text = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert asked.pop() in ("Rome", "Paris")
    assert text == result.final_output


async def structured():
    result = await Runner.run(agent(output_type=Capital), "What is the capital of France?")
    assert result.final_output.country in ("France", "Spain")
    guide = agent(output_type=Capital, tools=[weather], settings={"tool_choice": "required"})
    result = await Runner.run(guide, "What is the weather in the capital of France?")
    assert asked.pop() in ("Rome", "Paris")
    assert result.final_output.country in ("France", "Spain")


async def errors():
    refused = None
    try:
        await Runner.run(agent(settings={"temperature": 3}), "Hello")
    except openai.BadRequestError as error:
        refused = error
    assert refused is not None
    assert refused.param == "temperature"


async def main():
    for check in (run, tools, stream, structured, errors):
        await check()
        print(f"{check.__name__} passed")


set_tracing_disabled(True)
asyncio.run(main())
