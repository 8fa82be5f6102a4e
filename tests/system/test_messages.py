"""What /v1/messages says, whole and streamed, is what a chat says of the same conversation."""

import json
import random
from typing import Any

import httpx
import pytest

from tests.system.serving import Serving

QUESTION = {"role": "user", "content": "What is the weather in Rome, and why?"}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
FUNCTION = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": CITY},
}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "Sunny."}
CALL = {"id": "a", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}

CONVERSATIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages": [QUESTION]}, {"messages": [QUESTION]}),
    (
        {"system": "You are brief.", "messages": [QUESTION], "stop_sequences": ["e", "th"]},
        {
            "messages": [{"role": "system", "content": "You are brief."}, QUESTION],
            "stop": ["e", "th"],
        },
    ),
    (
        {"messages": [QUESTION, {"role": "assistant", "content": "It is"}]},
        {
            "messages": [QUESTION, {"role": "assistant", "content": "It is"}],
            "continue_final_message": True,
        },
    ),
    (
        {"messages": [QUESTION], "tools": [TOOL], "tool_choice": {"type": "any"}},
        {"messages": [QUESTION], "tools": [FUNCTION], "tool_choice": "required"},
    ),
    (
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [RESULT, {"type": "text", "text": "So?"}]},
            ]
        },
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "Sunny."},
                {"role": "user", "content": "So?"},
            ]
        },
    ),
]


def ask(server: Serving, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60).raise_for_status()


def shown(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks without what a chat does not tell, or tells in another way."""
    told = ("type", "text", "name", "input")
    return [{name: block[name] for name in told if name in block} for block in blocks]


def blocks_of(chat: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat's message as blocks."""
    text = [{"type": "text", "text": chat["content"]}] if chat["content"] else []
    calls = [
        {
            "type": "tool_use",
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in chat.get("tool_calls", [])
    ]
    return [*text, *calls]


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            (kind, more) = event["delta"].values()
            name = {"input_json_delta": "input", "text_delta": "text"}[kind]
            blocks[-1][name] = (blocks[-1][name] or "") + more
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return blocks


@pytest.mark.parametrize(("asked", "meant"), CONVERSATIONS)
def test_it_says_what_a_chat_says(
    server: Serving, asked: dict[str, Any], meant: dict[str, Any]
) -> None:
    sampled = {"max_tokens": 24, "seed": random.randrange(2**32)}
    print(sampled)
    message = ask(server, "/v1/messages", asked | sampled).json()
    chat = ask(server, "/v1/chat/completions", meant | sampled).json()
    said = shown(message["content"])
    assert said == blocks_of(chat["choices"][0]["message"])
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    names = ("messages", "system", "tools", "tool_choice")
    counted = {name: value for name, value in asked.items() if name in names}
    assert ask(server, "/v1/messages/count_tokens", counted).json() == {"input_tokens": prompt}
    lines = ask(server, "/v1/messages", asked | sampled | {"stream": True}).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert shown(assembled(events)) == said
    assert events[-2]["delta"].items() <= message.items()
    assert chat["choices"][0]["stop_reason"] == message["stop_sequence"]
