"""litellm against a server: python litellm_client.py URL MODEL"""

import asyncio
import json
import sys

import litellm

URL, MODEL = f"{sys.argv[1]}/v1", f"openai/{sys.argv[2]}"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASKED = {"api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 16, "num_retries": 0}
CAPITAL = {
    "type": "object",
    "properties": {"country": {"enum": ["France", "Spain"]}},
    "required": ["country"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "capital_of", "parameters": CAPITAL}}


def completion(**fields):
    return litellm.completion(**{"model": MODEL, "messages": QUESTION, **ASKED, **fields})


def chat():
    whole = completion()
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(completion(stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def several_choices():
    answer = completion(n=3, temperature=1, seed=4, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def text():
    answer = litellm.text_completion(
        **ASKED | {"max_tokens": 4}, model=f"text-completion-{MODEL}", prompt="1, 2, 3,"
    )
    assert answer.choices[0].text.strip().startswith("4")


def structured():
    schema = {"type": "json_schema", "json_schema": {"name": "capital", "schema": CAPITAL}}
    answer = completion(response_format=schema, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["country"] in ("France", "Spain")


def tools():
    answer = completion(tools=[TOOL], tool_choice="required", max_tokens=80)
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "capital_of"
    assert json.loads(call.function.arguments)["country"] in ("France", "Spain")


def other_providers():
    """It speaks to vLLM with fields of its own, and to Anthropic by the Messages API."""
    name, said = sys.argv[2], completion().choices[0].message.content
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "reasoning_effort": "low"}
    anthropic = {"model": f"anthropic/{name}", "api_base": sys.argv[1]}
    for fields in ({"model": f"hosted_vllm/{name}"} | thinking, anthropic):
        assert completion(**fields).choices[0].message.content == said
        rebuilt = litellm.stream_chunk_builder(list(completion(**fields, stream=True)))
        assert rebuilt.choices[0].message.content == said
        called = completion(**fields, tools=[TOOL], tool_choice="required", max_tokens=200)
        (call, *_) = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["country"] in ("France", "Spain")


def together():
    async def ask():
        fields = {"model": MODEL, "messages": QUESTION, **ASKED}
        return await asyncio.gather(*(litellm.acompletion(**fields) for _ in range(4)))

    texts = {answer.choices[0].message.content for answer in asyncio.run(ask())}
    assert len(texts) == 1


def embeddings():
    asked = {"model": MODEL, "api_base": URL, "api_key": "none", "input": ["a", "b"]}
    answer = litellm.embedding(**asked, encoding_format="float")
    assert [len(entry["embedding"]) for entry in answer.data] == [576, 576]
    assert answer.usage.prompt_tokens == 2


def errors():
    for fields, kind in (
        ({"temperature": 3}, litellm.BadRequestError),
        ({"model": "openai/gpt-0"}, litellm.NotFoundError),
        ({"max_tokens": 10**6}, litellm.ContextWindowExceededError),
    ):
        try:
            completion(**fields)
        except kind:
            continue
        raise AssertionError(f"{fields} raised no {kind.__name__}")


for check in (
    *(chat, several_choices, text, structured, tools),
    *(other_providers, together, embeddings, errors),
):
    check()
    print(f"{check.__name__} passed")
