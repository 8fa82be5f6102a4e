"""langchain-openai against a server: python langchain_client.py URL MODEL"""

import sys
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
QUESTION = "What is the capital of France?"


def chat_model(**fields):
    asked = {"base_url": URL, "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}
    return ChatOpenAI(**{**asked, "max_completion_tokens": 60, **fields})


class Capital(BaseModel):
    """The capital of a country."""

    country: Literal["France", "Spain"]


@tool
def capital_of(country: Literal["France", "Spain"]) -> str:
    """The capital of a country."""
    return {"France": "Paris", "Spain": "Madrid"}[country]


def invoke_and_stream():
    whole = chat_model().invoke(QUESTION)
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    chunks = list(chat_model(stream_usage=True).stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert used[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]


def batch_through_a_chain():
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer briefly."), ("user", "{question}")]
    )
    answers = (prompt | chat_model()).batch([{"question": QUESTION}] * 3)
    assert len({answer.content for answer in answers}) == 1


def logprobs():
    answer = chat_model(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = answer.response_metadata["logprobs"]["content"]
    *tokens, end = [entry["token"] for entry in entries]
    assert ("".join(tokens), end) == (answer.content, "<|im_end|>")


def structured():
    for method in ("json_schema", "function_calling"):
        answer = chat_model().with_structured_output(Capital, method=method).invoke(QUESTION)
        assert isinstance(answer, Capital), method


def tools():
    model = chat_model().bind_tools([capital_of], tool_choice="required")
    message = model.invoke(QUESTION)
    results = [capital_of.invoke(call) for call in message.tool_calls]
    assert results
    assert all(isinstance(result, ToolMessage) for result in results)
    again = chat_model().bind_tools([capital_of])
    assert again.invoke([HumanMessage(QUESTION), message, *results]).content


def responses():
    model = chat_model(use_responses_api=True)
    whole = model.invoke(QUESTION)
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == whole.text
    message = model.bind_tools([capital_of], tool_choice="required").invoke(QUESTION)
    results = [capital_of.invoke(call) for call in message.tool_calls]
    assert model.invoke([HumanMessage(QUESTION), message, *results]).text


def text():
    model = OpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=4)
    assert model.invoke("1, 2, 3,").strip().startswith("4")
    assert len(model.generate(["1, 2, 3,", "a, b,"]).generations) == 2


def embeddings():
    model = OpenAIEmbeddings(
        base_url=URL,
        api_key="none",
        model=MODEL,
        check_embedding_ctx_length=False,  # else it sends ids of a tokenizer of OpenAI's
        dimensions=32,
    )
    texts = [f"a text with the number {number}" for number in range(40)]
    vectors = model.embed_documents(texts)
    assert {len(vector) for vector in vectors} == {32}
    assert model.embed_query(texts[7]) == vectors[7]


def errors():
    refused = None
    try:
        chat_model(temperature=3).invoke(QUESTION)
    except openai.BadRequestError as error:
        refused = error
    assert refused is not None
    assert refused.param == "temperature"


for check in (
    *(invoke_and_stream, batch_through_a_chain, logprobs, structured),
    *(tools, responses, text, embeddings, errors),
):
    check()
    print(f"{check.__name__} passed")
