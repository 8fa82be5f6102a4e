"""LoRA adapters as models that clients name: what each route makes of their names."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from pagefleet.manifest import Adapter
from pagefleet.params import SamplingParams
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.tokenizing import count_input, count_message, detokenize, tokenize
from pagefleet_gateway.model import NamesError, ServedModel
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.requests.embedding_input import understand_embedding
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.messages_input import understand_message
from pagefleet_gateway.requests.response_input import understand_response
from pagefleet_gateway.requests.understanding import understand_chat, understand_completion
from pagefleet_gateway.tenants import prefix_salt
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.served import echo_model

ADAPTERS = (Adapter("sql", "/adapters/sql"), Adapter("poet", "/adapters/poet-v2"))
LIMITS = Limits(max_model_len=100)
HELLO = {"role": "user", "content": "hello"}

Understand = Callable[[bytes, ServedModel, Limits], Generation]
ROUTES: dict[str, tuple[Understand, dict[str, Any]]] = {
    "completions": (understand_completion, {"prompt": "hello"}),
    "chat": (understand_chat, {"messages": [HELLO]}),
    "responses": (understand_response, {"input": "hello"}),
    "messages": (understand_message, {"messages": [HELLO], "max_tokens": 5}),
    "embeddings": (understand_embedding, {"input": "hello"}),
}
TOKENIZING: dict[str, tuple[Callable[[bytes, ServedModel, int], Any], dict[str, Any]]] = {
    "tokenize": (tokenize, {"prompt": "hello"}),
    "detokenize": (detokenize, {"tokens": [104]}),
    "input_tokens": (count_input, {"input": "hello"}),
    "count_tokens": (count_message, {"messages": [HELLO]}),
}


def served() -> ServedModel:
    """The echo model by two names, and two adapters."""
    model = echo_model()
    return replace(
        model, aliases=("alias",), manifest=structs.replace(model.manifest, adapters=ADAPTERS)
    )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "adapter", "answers"),
    [
        (None, 0, "echo"),
        ("echo", 0, "echo"),
        ("alias", 0, "echo"),
        ("sql", 1, "sql"),
        ("poet", 2, "poet"),
    ],
)
def test_a_name_says_what_computes(
    route: str, name: str | None, adapter: int, answers: str
) -> None:
    understand, fields = ROUTES[route]
    generation = understand(json.dumps({"model": name} | fields).encode(), served(), LIMITS)
    assert (generation.model, generation.params.adapter) == (answers, adapter)
    plain = understand(json.dumps(fields).encode(), echo_model(), LIMITS)
    params = structs.replace(generation.params, adapter=0, seed=plain.params.seed)
    assert (params, generation.prompts) == (plain.params, plain.prompts)


@pytest.mark.parametrize("route", [*ROUTES, *TOKENIZING])
def test_other_names_are_not_found(route: str) -> None:
    understand, fields = (ROUTES | TOKENIZING)[route]  # type: ignore[operator]
    limits = LIMITS if route in ROUTES else 100
    for name in ("", "SQL", "poet-v2", "sql,poet", "/adapters/sql"):
        with pytest.raises(ApiError) as refused:
            understand(json.dumps({"model": name} | fields).encode(), served(), limits)
        assert (refused.value.status, refused.value.param) == (404, "model")


@pytest.mark.parametrize("route", TOKENIZING)
def test_the_tokenizer_is_the_models(route: str) -> None:
    work, fields = TOKENIZING[route]
    answers = [
        work(json.dumps({"model": name} | fields).encode(), served(), 100)
        for name in (None, "sql", "poet")
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_shared_between_adapters(route: str) -> None:
    understand, fields = ROUTES[route]
    salts = {
        (name, salt): understand(
            json.dumps({"model": name, "cache_salt": salt} | fields).encode(), served(), LIMITS
        )
        .submits[0]
        .salt
        for name in (None, "sql", "poet")
        for salt in (None, "mine", "1")
    }
    assert len({*salts.values()}) == len(salts)
    assert salts[None, None] == b""


def test_salts_separate_adapters_whatever_else_is_in_them() -> None:
    fields = [(key, salt, n) for key in (None, b"1") for salt in (None, "1") for n in range(12)]
    assert len({prefix_salt(*each) for each in fields}) == len(fields)


def test_the_fingerprint_tells_adapters_apart() -> None:
    def fingerprint(name: str | None) -> object:
        understand, fields = ROUTES["completions"]
        body = json.dumps({"model": name} | fields).encode()
        answer = Answer(understand(body, served(), LIMITS), served())
        answer.choices[0].numerics = 7
        return answer.fingerprint([0])

    told = [fingerprint(name) for name in ("echo", "alias", None, "sql", "poet", "sql")]
    assert len({*told}) == 3
    assert (told[0], told[3]) == (told[2], told[5])


def test_a_name_of_two_things_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    folder = prepare("echo", tmp_path, adapters={"sql": str(tmp_path), "poet": str(tmp_path)})
    for names in (None, "a,b", "sq"):
        assert ServedModel.load(folder, names).named("poet").adapter == 2
    for names in ("sql", "a,poet"):
        with pytest.raises(NamesError, match="is a name of the model and of a LoRA adapter"):
            ServedModel.load(folder, names)
    command = [sys.executable, "-m", "pagefleet_gateway", f"--model={folder}"]
    ended = subprocess.run(
        [*command, "--served-model-name=sql"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "pagefleet gateway: 'sql' is a name of the model and of a LoRA adapter: change "
        "--lora-modules, or --served-model-name.\n"
    )


def test_params_of_no_adapter_are_the_base_models() -> None:
    assert SamplingParams(max_tokens=1, seed=0).adapter == served().adapter == 0
