"""A cell serves a small gpt-oss as it is published: experts in MXFP4, chats in Harmony."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM

from pagefleet_gateway.text.harmony import HarmonyParser
from pagefleet_worker.prepare import default_cache
from tests.checkpoints import write_mxfp4
from tests.models import make_model
from tests.system.serving import Serving, pagefleet_serve
from tests.unit.worker.test_quantized_engine import MOSTLY

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
TEMPLATE = """\
{%- for message in messages %}
  {%- if message.role == "assistant" %}
    {%- if message.thinking %}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
      {{- "<|start|>assistant to=functions." + call.function.name }}
      {{- "<|channel|>commentary json<|message|>" + call.function.arguments|tojson + "<|call|>" }}
    {%- else %}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- endfor %}
  {%- else %}
    {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""
"""Of the shape that the published one has."""

SAID = [
    {"role": "user", "content": "Rain? <|end|>"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Look.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "no"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = make_model("gpt-oss", tmp_path_factory.mktemp("gpt-oss") / "source")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    write_mxfp4(source, source.with_name("model"))
    return source.with_name("model")


@pytest.fixture(scope="module")
def serving(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Prepares the model in a cache of its own, with the compiled kernels of the user's."""
    place = tmp_path_factory.mktemp("serving")
    (own := place / "cache" / "pagefleet").mkdir(parents=True)
    (kernels := default_cache() / "kernels").mkdir(parents=True, exist_ok=True)
    (own / "kernels").symlink_to(kernels)
    options = [f"--model={folder}", "--device=cpu", "--dtype=float32", "--num-blocks=60"]
    options += ["--tool-call-parser=openai", "--max-model-len=400"]
    with pagefleet_serve(place, *options, XDG_CACHE_HOME=str(own.parent)) as serving:
        yield serving


def post(serving: Serving, route: str, **body: object) -> dict[str, object]:
    answer = httpx.post(f"{serving.url}{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@torch.inference_mode()
def test_answers_are_those_of_transformers(serving: Serving, folder: Path) -> None:
    body = {"messages": SAID, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = post(serving, "/v1/chat/completions", **body, logprobs=True, return_token_ids=True)
    prompt = post(serving, "/tokenize", messages=SAID)["tokens"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    assert [token for token in prompt if token in ids.values()].count(ids["<|end|>"]) == 3
    assert prompt[-10:] == [ids["<|start|>"], *tokenizer.encode("assistant").ids]
    oracle = AutoModelForCausalLM.from_pretrained(
        folder.with_name("model-widened"), dtype=torch.float32
    )
    (choice,) = answer["choices"]
    tokens = torch.tensor(choice["token_ids"])
    logits = oracle(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    chosen = expected.gather(1, tokens[:, None])[:, 0]
    assert (expected.amax(-1) - chosen).median() <= MOSTLY


@pytest.mark.slow
def test_chats_are_parted_however_they_come(serving: Serving, folder: Path) -> None:
    """With marks made likely: what comes is what the parser makes of all tokens at once."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    likely = {str(tokenizer.token_to_id(mark)): 4 for mark in MARKS[:4]}
    stops = [tokenizer.token_to_id(mark) for mark in MARKS[4:]]
    for seed in range(20):
        body = {"messages": SAID[:1], "max_tokens": 100, "seed": seed, "logit_bias": likely}
        whole = post(serving, "/v1/chat/completions", **body, return_token_ids=True)
        (choice,) = whole["choices"]
        tokens, finish = choice["token_ids"], choice["finish_reason"]
        assert (tokens[-1] in [*stops, 257]) == (finish == "stop")
        assert not set(tokens[:-1]) & {*stops, 257}
        shown = tokens[:-1] if finish == "stop" else tokens
        parser = HarmonyParser()
        said = [parser.push(tokenizer.decode(shown, skip_special_tokens=False)), parser.finish()]
        thoughts, content = ("".join(part) for part in zip(*said, strict=True))
        message = choice["message"]
        assert (message.get("reasoning_content") or "", message["content"] or "") == (
            thoughts,
            content,
        )
        streamed = ["", ""]
        with httpx.stream(
            "POST", f"{serving.url}/v1/chat/completions", json=body | {"stream": True}, timeout=60
        ) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    for part in json.loads(line[6:])["choices"]:
                        streamed[0] += part["delta"].get("reasoning_content") or ""
                        streamed[1] += part["delta"].get("content") or ""
        assert streamed == [thoughts, content]
