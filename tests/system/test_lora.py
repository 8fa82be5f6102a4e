"""LoRA adapters over HTTP, as models of their own: of the echo model, and of one with weights."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagefleet.manifest import Manifest
from pagefleet.params import SamplingParams
from pagefleet_gateway.tenants import prefix_salt
from pagefleet_worker.prepare import prepare
from pagefleet_worker.simulated.echo_decoder import EchoDecoder, echo_tokens
from tests.lora import make_adapter, merged
from tests.models import VOCAB_SIZE
from tests.system.oracle import Oracle
from tests.system.serving import Serving, pagefleet_serve

NAMES = ("echo", "sql", "poet")


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """An echo model with two adapters, on two workers; every invariant is checked at each step."""
    folder = tmp_path_factory.mktemp("serving")
    for name in NAMES[1:]:
        (folder / f"{name}-v1").mkdir()
    modules = ",".join(f"{name}={folder}/{name}-v1" for name in NAMES[1:])
    options = ("--model=echo", "--engine=echo", "--workers=2", "--check")
    with pagefleet_serve(folder, *options, f"--lora-modules={modules}") as serving:
        yield serving


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> EchoDecoder:
    manifest = Manifest.load(prepare("echo", tmp_path_factory.mktemp("cache")))
    return EchoDecoder(manifest.vocab_size, manifest.eos_token_ids)


def ask(serving: Serving, path: str = "/v1/completions", **fields: Any) -> Any:
    answer = httpx.post(serving.url + path, json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_they_are_listed_beside_the_model(echo: Serving) -> None:
    assert "LoRA adapters, by the names to ask for them: sql, poet\n" in echo.greeting
    models = httpx.get(f"{echo.url}/v1/models").json()["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in models] == [
        ("echo", "echo", None),
        ("sql", "sql-v1", "echo"),
        ("poet", "poet-v1", "echo"),
    ]
    for each in models:
        assert httpx.get(f"{echo.url}/v1/models/{each['id']}").json() == each
    assert httpx.get(f"{echo.url}/v1/models/prose").status_code == 404


def test_each_answers_as_itself(echo: Serving, decoder: EchoDecoder) -> None:
    prompt = list(b"Which of you is it?")
    fingerprints = set()
    for adapter, name in enumerate(NAMES):
        body = ask(
            echo, model=name, prompt=prompt, seed=7, max_tokens=24, n=2, return_token_ids=True
        )
        assert body["model"] == name
        fingerprints.add(body["system_fingerprint"])
        params = SamplingParams(
            max_tokens=24, seed=7, eos_token_ids=decoder.eos_token_ids, adapter=adapter
        )
        salt = prefix_salt(None, None, adapter)
        for choice in body["choices"]:
            expected = echo_tokens(decoder, prompt, params, choice["index"], salt)
            assert choice["token_ids"] == expected.tokens
    assert len(fingerprints) == len(NAMES)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}]}),
        ("/v1/responses", {"input": "Who?", "max_output_tokens": 9}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 9}),
        ("/v1/embeddings", {"input": "Who?"}),
    ],
)
def test_every_route_takes_their_names(echo: Serving, path: str, fields: dict[str, Any]) -> None:
    answers = [ask(echo, path, model=name, **fields) for name in NAMES]
    assert tuple(answer["model"] for answer in answers) == NAMES
    said = ("data", "choices", "output", "content")
    told = {str([answer.get(field) for field in said]) for answer in answers}
    assert len(told) == len(NAMES)


def test_prefixes_are_shared_by_those_of_one_adapter(echo: Serving) -> None:
    prompt = "Nothing that was computed for one may be read by the others. " * 3

    def cached(name: str) -> int:
        usage = ask(echo, model=name, prompt=prompt, max_tokens=1)["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    first, again = ([cached(name) for name in NAMES] for _ in range(2))
    assert first == [0, 0, 0]
    assert again == [(len(prompt) - 1) // 16 * 16] * 3


def test_a_stream_goes_on_with_its_own_adapter_only(echo: Serving) -> None:
    asked = {"prompt": "Go on.", "max_tokens": 200, "seed": 1, "ignore_eos": True, "stream": True}

    def events(name: str, last: str = "") -> httpx.Response:
        return httpx.post(
            f"{echo.url}/v1/completions",
            json={"model": name} | asked,
            headers={"Last-Event-ID": last},
            timeout=60,
        )

    def pieces(stream: httpx.Response) -> list[tuple[str, str]]:
        *written, _, _ = stream.text.split("\n\n")
        pairs = [each.removeprefix("id: ").split("\ndata: ") for each in written]
        return [(last, json.loads(data)["choices"][0]["text"]) for last, data in pairs]

    whole = pieces(events("sql"))
    cut = len(whole) // 2  # tokens that come together are one event
    last, _ = whole[cut]
    rest = pieces(events("sql", last))
    assert "".join(text for _, text in rest) == "".join(text for _, text in whole[cut + 1 :])
    refused = events("poet", last)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "gone")


def test_what_each_took_is_counted(echo: Serving) -> None:
    tokens = 'pagefleet_lora_tokens_total{kind="prompt",lora="poet"}'
    requests = 'pagefleet_lora_requests_total{lora="poet",status="200"}'

    def counts() -> list[float]:
        ask(echo, model="poet", prompt="12345", max_tokens=3)
        ask(echo, model="sql", prompt="1234567", max_tokens=3)
        return [
            float(line.rpartition(" ")[2])
            for name in (tokens, requests)
            for line in httpx.get(f"{echo.url}/metrics").text.splitlines()
            if line.startswith(name)
        ]

    before, after = counts(), counts()
    assert (after[0] - before[0], after[1] - before[1]) == (5, 1)


def test_one_that_cannot_be_served_stops_the_start(tmp_path: Path) -> None:
    options = ("--model=echo", "--engine=echo", f"--lora-modules=sql={tmp_path}/nowhere")
    with (
        pytest.raises(AssertionError, match="There is no folder of the LoRA adapter 'sql'"),
        pagefleet_serve(tmp_path, *options),
    ):
        pass


@pytest.mark.slow
def test_equal_to_transformers_with_merged_weights(
    small_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Greedy answers to prompts that begin alike, with two adapters and without, all at once."""
    model, seed = small_model("llama"), random.randrange(2**32)
    print("seed", seed)
    draw, folders, oracles = random.Random(seed), {}, [Oracle(model)]
    for kind in ("all", "odd"):
        folders[kind] = tmp_path / kind
        change = make_adapter(kind, model, folders[kind], seed)
        merged(model, change).save_pretrained(tmp_path / f"merged-{kind}")
        oracles.append(Oracle(tmp_path / f"merged-{kind}"))
    common = draw.choices(range(VOCAB_SIZE), k=40)
    prompts = [
        common[: draw.randint(0, 40)] + draw.choices(range(VOCAB_SIZE), k=draw.randint(1, 9))
        for _ in range(8)
    ]

    async def answers(serving: Serving) -> list[list[Any]]:
        async def ask(name: str | None, prompt: list[int]) -> Any:
            body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}
            body |= {"logprobs": 0, "return_token_ids": True}
            return (await client.post("/v1/completions", json=body)).json()["choices"][0]

        async with httpx.AsyncClient(base_url=serving.url, timeout=300) as client:
            asked = [[ask(name, prompt) for prompt in prompts] for name in (None, *folders)]
            return await asyncio.gather(*(asyncio.gather(*each) for each in asked))

    modules = ",".join(f"{name}={folder}" for name, folder in folders.items())
    options = (f"--model={model}", "--dtype=float32", "--check", f"--lora-modules={modules}")
    with pagefleet_serve(tmp_path, *options) as serving:
        served = asyncio.run(answers(serving))
    compared, told = 0, []
    for oracle, choices in zip(oracles, served, strict=True):
        expected = oracle.greedy(prompts, 16)
        told.append([greedy.tokens for greedy in expected])
        compared += sum(
            greedy.compare_chosen(choice["token_ids"], choice["logprobs"]["token_logprobs"])
            for greedy, choice in zip(expected, choices, strict=True)
        )
    assert compared >= 0.75 * sum(len(tokens) for each in told for tokens in each)
    assert told[0] != told[1] != told[2] != told[0]
