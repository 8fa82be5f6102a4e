"""/v1/embeddings: what is taken and refused, and over real HTTP what is answered."""

import base64
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from msgspec import structs
from tokenizers import Tokenizer, processors

from pagefleet.wire import unpack_floats, unpack_ints
from pagefleet_gateway.bodies.embedding_form import EmbeddingForm
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.embedding_input import understand_embedding
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.prompts import MAX_PROMPTS
from pagefleet_gateway.requests.response_input import understand_response
from pagefleet_gateway.requests.understanding import understand_chat, understand_completion
from pagefleet_gateway.tenants import prefix_salt
from pagefleet_gateway.text.tokenizer import Tokenizer as GatewayTokenizer
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.fake_scheduler import expected_embedding
from tests.unit.gateway.served import echo_model
from tests.unit.gateway.test_app import Cell, error_of, running_cell, wait_until

ROUTE = "/v1/embeddings"
LIMITS = Limits(max_model_len=100)
HELLO = list(b"hello")
BOS, EOS = 256, 257


def understood(**fields: Any) -> Generation:
    body = json.dumps({"input": "hello"} | fields).encode()
    return understand_embedding(body, echo_model(), LIMITS)


@pytest.mark.parametrize(
    ("asked", "prompts"),
    [
        ("hello", [HELLO]),
        (["hello", "a"], [HELLO, [97]]),
        (HELLO, [HELLO]),
        ([HELLO, [97]], [HELLO, [97]]),
        ("a" * 100, [[97] * 100]),
    ],
)
def test_texts_and_ids_are_taken(asked: Any, prompts: list[list[int]]) -> None:
    generation = understood(input=asked)
    assert generation.prompts == prompts
    assert [unpack_ints(submit.prompt).tolist() for submit in generation.submits] == prompts
    for submit in generation.submits:
        assert (submit.params.max_tokens, submit.params.embedding) == (0, 0)


def test_what_a_request_says_of_itself_is_handed_on() -> None:
    generation = understood(
        dimensions=3, priority=4, cache_salt="mine", timeout=5.5, request_id="me", user="x", zork=1
    )
    (submit,) = generation.submits
    assert (generation.id, generation.ignored) == ("embd-me", ["zork"])
    assert (submit.params.embedding, submit.priority, submit.left) == (3, 4, 5.5)
    assert submit.salt == prefix_salt(LIMITS.tenant.digest, "mine")


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"truncate_prompt_tokens": 2}, b"lo"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, b"he"),
        ({"truncate_prompt_tokens": -1, "input": "x" + "a" * 100}, b"a" * 100),
    ],
)
def test_long_texts_are_cut_where_asked(fields: dict[str, Any], prompt: bytes) -> None:
    assert understood(**fields).prompts == [list(prompt)]


def ending_model() -> ServedModel:
    """Its tokenizer encloses texts, as those of models for embeddings end them."""
    backend = Tokenizer.from_str(echo_model().tokenizer.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", BOS), ("<|eos|>", EOS)]
    )
    return replace(echo_model(), tokenizer=GatewayTokenizer(backend, 4096))


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, [BOS, *HELLO, EOS]),
        ({"add_special_tokens": False}, HELLO),
        ({"truncate_prompt_tokens": 3}, [*b"lo", EOS]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [BOS, *b"h", EOS]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "right"}, [BOS, *HELLO, EOS]),
        ({"truncate_prompt_tokens": 1, "truncation_side": "right"}, [EOS]),
        (
            {"truncate_prompt_tokens": 3, "truncation_side": "right", "input": [*HELLO, 97]},
            [*b"hel"],
        ),
        (
            {
                "truncate_prompt_tokens": 3,
                "truncation_side": "right",
                "add_special_tokens": False,
            },
            [*b"hel"],
        ),
    ],
)
def test_a_text_keeps_the_end_that_it_is_read_at(fields: dict[str, Any], prompt: list[int]) -> None:
    body = json.dumps({"input": "hello"} | fields).encode()
    assert understand_embedding(body, ending_model(), LIMITS).prompts == [prompt]


@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_cannot_be_read(side: str) -> None:
    body = json.dumps({"input": "a", "truncate_prompt_tokens": 0, "truncation_side": side})
    with pytest.raises(ApiError, match="input has no tokens"):
        understand_embedding(body.encode(), ending_model(), LIMITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", None),
        ("input", ""),
        ("input", []),
        ("input", ["a", ""]),
        ("input", [[]]),
        ("input", ["a", 5]),
        ("input", [[5], "a"]),
        ("input", [-1]),
        ("input", [260]),
        ("input", [[5], [260]]),
        ("input", ["a"] * (MAX_PROMPTS + 1)),
        ("input", "a" * 101),
        ("input", {"text": "a"}),
        ("encoding_format", "int8"),
        ("dimensions", 0),
        ("dimensions", 2**40),
        ("dimensions", "8"),
        ("truncate_prompt_tokens", -2),
        ("priority", 2**31),
        ("timeout", 0),
        ("user", 5),
        ("model", 5),
        ("stream", True),
        ("prompt", "hello"),
        ("messages", []),
        ("normalize", False),
        ("embed_dtype", "int8"),
        ("encoding_fromat", "float"),
        ("dimension", 8),
    ],
)
def test_all_else_is_refused_by_name(field: str, value: Any) -> None:
    if value is None:
        with pytest.raises(ApiError) as refused:
            understand_embedding(b"{}", echo_model(), LIMITS)
    else:
        with pytest.raises(ApiError) as refused:
            understood(**{field: value})
    assert refused.value.status == 400
    assert refused.value.param is not None
    assert refused.value.param.partition("[")[0] == field


def test_another_route_has_none_of_its_fields() -> None:
    completion = understand_completion(b'{"prompt": "a", "dimensions": 5}', echo_model(), LIMITS)
    assert completion.ignored == ["dimensions"]
    assert understood(temperature=0.5, max_tokens=1).ignored == ["temperature", "max_tokens"]


@pytest.mark.parametrize(
    ("understand", "body"),
    [
        (understand_completion, b'{"prompt": "a"}'),
        (understand_chat, b'{"messages": [{"role": "user", "content": "a"}]}'),
        (understand_response, b'{"input": "a"}'),
    ],
)
def test_a_model_without_a_head_gives_nothing_else(understand: Any, body: bytes) -> None:
    model = model_that(writes=False)
    with pytest.raises(ApiError, match="no head that chooses tokens") as refused:
        understand(body, model, LIMITS)
    assert (refused.value.status, refused.value.param) == (400, "model")
    assert understand_embedding(b'{"input": "a"}', model, LIMITS).prompts == [[97]]


def test_a_model_whose_embeddings_are_made_otherwise_gives_none() -> None:
    with pytest.raises(ApiError, match="more than the states of last tokens") as refused:
        understand_embedding(b'{"input": "a"}', model_that(embeds=False), LIMITS)
    assert (refused.value.status, refused.value.param) == (400, "model")


def model_that(**says: bool) -> ServedModel:
    model = echo_model()
    return replace(model, manifest=structs.replace(model.manifest, **says))


def test_a_worker_that_gave_none_is_our_fault() -> None:
    """One of an earlier version knows nothing of embeddings."""
    with pytest.raises(ApiError) as raised:
        EmbeddingForm(as_bytes=False, dimensions=None).written(None)
    assert (raised.value.status, raised.value.code) == (500, "no_embedding")


# --- over HTTP ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("echo", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def cell(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    with running_cell(model, tmp_path_factory.mktemp("cell")) as cell:
        yield cell


def test_an_answer_is_what_its_document_says(cell: Cell) -> None:
    response = cell.post(ROUTE, input=["hello", "world!"], zork=1)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "zork"
    assert response.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": expected_embedding(list(text))}
            for i, text in enumerate([b"hello", b"world!"])
        ],
        "model": "echo",
        "usage": {"prompt_tokens": 11, "total_tokens": 11},
    }
    told = httpx.get(f"{cell.url}/openapi.json").json()
    content = told["paths"][ROUTE]["post"]["responses"]["200"]["content"]
    jsonschema.validate(response.json(), told | content["application/json"]["schema"])


def test_numbers_may_come_as_bytes(cell: Cell) -> None:
    response = cell.post(ROUTE, input=HELLO, encoding_format="base64", dimensions=3)
    (entry,) = response.json()["data"]
    numbers = unpack_floats(base64.b64decode(entry["embedding"]))
    assert numbers.tolist() == expected_embedding(HELLO, 3)


def test_more_numbers_than_there_are_is_a_bad_request(cell: Cell) -> None:
    response = cell.post(ROUTE, input="hello", dimensions=5)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "dimensions"
    assert error["message"] == "dimensions is 5, but this model's embeddings have 4."
    wait_until(lambda: not cell.scheduler.running)


@pytest.mark.parametrize("form", [openai.omit, "float"])
def test_the_openai_client_reads_them(cell: Cell, form: Any) -> None:
    with openai.OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(
            model="echo", input=["hello", "a"], dimensions=2, encoding_format=form
        )
    expected = [expected_embedding(HELLO, 2), expected_embedding([97], 2)]
    assert [each.embedding for each in answer.data] == expected
    assert [each.index for each in answer.data] == [0, 1]
    assert answer.usage.total_tokens == 6


def test_what_it_took_is_counted(cell: Cell) -> None:
    def figures() -> dict[str, float]:
        lines = httpx.get(f"{cell.url}/metrics").text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if line[:1] != "#")
        return {name: float(value) for name, _, value in pairs}

    before = figures()
    assert cell.post(ROUTE, input=["hello", "a"]).status_code == 200
    grown = {name: value - before.get(name, 0) for name, value in figures().items()}

    def total(start: str, part: str = "") -> float:
        return sum(
            value for name, value in grown.items() if name.startswith(start) and part in name
        )

    assert total("vllm:prompt_tokens_total") == 6
    assert total("vllm:request_success_total", "length") == 2
    assert total("vllm:request_prefill_time_seconds_count") == 1
    assert total("vllm:request_decode_time_seconds_count") == 0
    assert total("vllm:generation_tokens_total") == 0
    assert total("vllm:time_to_first_token_seconds_count") == 0


def test_whoever_leaves_is_not_waited_for(cell: Cell) -> None:
    scheduler = cell.scheduler
    scheduler.submits.clear()
    scheduler.aborts.clear()
    scheduler.step_seconds = 1e6
    body = b'{"input": "hello"}'
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", cell.port)) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: len(scheduler.submits) == 1)
    wait_until(lambda: len(scheduler.aborts) == 1)
    scheduler.step_seconds = 0.0
