"""The openai Python client against `pagefleet serve` with the default model."""

from collections.abc import Iterator

import openai
import pytest

from tests.system.serving import Serving
from tests.unit.launcher.conftest import wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI, server: Serving) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-0")
    assert raised.value.code == "model_not_found"


def test_chat(client: openai.OpenAI, server: Serving) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=QUESTION, max_completion_tokens=16, temperature=0
    )
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_prediction_is_drafted_from_and_changes_nothing(
    client: openai.OpenAI, server: Serving
) -> None:
    question = [{"role": "user", "content": "Write a poem about the sea and its four colours."}]

    def pieces(prediction: str) -> list[str]:
        stream = client.chat.completions.create(
            model=server.model,
            messages=question,
            max_tokens=60,
            seed=11,
            prediction={"type": "content", "content": prediction},
            stream=True,
        )
        return [chunk.choices[0].delta.content or "" for chunk in stream]

    def kept() -> float:
        return server.figure("vllm:spec_decode_num_accepted_tokens_total")

    wrong = pieces("Blue, and blue again. " * 20)
    text, before = "".join(wrong), kept()
    right = pieces(text)
    assert "".join(right) == text
    wait_until(lambda: kept() - before > len(wrong) / 2)


def test_streamed_chat(client: openai.OpenAI, server: Serving) -> None:
    asked = {"model": server.model, "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *pieces, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_completion_with_echo(client: openai.OpenAI, server: Serving) -> None:
    answer = client.completions.create(
        model=server.model, prompt="1, 2, 3,", max_tokens=3, temperature=0, echo=True
    )
    assert answer.choices[0].text.startswith("1, 2, 3,")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_several_prompts_and_choices(client: openai.OpenAI, server: Serving) -> None:
    asked = {"model": server.model, "prompt": ["One", "Two"], "n": 3, "max_tokens": 8, "seed": 5}
    first, again = client.completions.create(**asked), client.completions.create(**asked)
    assert [choice.index for choice in first.choices] == list(range(6))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) > 1
    assert texts == [choice.text for choice in again.choices]


def test_logprobs(client: openai.OpenAI, server: Serving) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=QUESTION,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
    completion = client.completions.create(
        model=server.model, prompt="Once", max_tokens=4, temperature=0, logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert "".join(logprobs.tokens) == completion.choices[0].text
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_stop(client: openai.OpenAI, server: Serving, stream: bool) -> None:
    asked = {"model": server.model, "prompt": "1, 2, 3, 4,", "max_tokens": 24, "temperature": 0}
    unstopped = client.completions.create(**asked).choices[0].text
    stop = unstopped[7:10]
    answer = client.completions.create(**asked, stop=[stop], stream=stream)
    chunks = list(answer) if stream else [answer]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == unstopped[: unstopped.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("wrong", "error", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"model": "gpt-0"}, openai.NotFoundError, "model"),
        ({"extra_body": {"temprature": 0}}, openai.BadRequestError, "temprature"),
    ],
)
def test_errors(
    client: openai.OpenAI,
    server: Serving,
    wrong: dict[str, object],
    error: type[openai.APIStatusError],
    param: str,
) -> None:
    asked = {"model": server.model, "messages": QUESTION, "max_tokens": 4} | wrong
    with pytest.raises(error) as raised:
        client.chat.completions.create(**asked)
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"
