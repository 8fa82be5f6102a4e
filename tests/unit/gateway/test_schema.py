"""Bodies of both routes: what is taken, and that all else is one error that names its field."""

import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet.manifest import CHAT_TEMPLATE_FILE
from pagefleet.wire import unpack_ints
from pagefleet_gateway.bodies.embedding_body import EmbeddingBody
from pagefleet_gateway.bodies.messages_body import MessagesBody
from pagefleet_gateway.bodies.other_fields import MEANT, UNSUPPORTED
from pagefleet_gateway.bodies.parsing import MAX_FIELDS, parse
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import ChatBody, CompletionBody
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.tokenizing import DetokenizeBody
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.embedding_input import understand_embedding
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.messages_input import understand_message
from pagefleet_gateway.requests.response_input import understand_response
from pagefleet_gateway.requests.understanding import understand_chat, understand_completion
from pagefleet_gateway.tenants import prefix_salt
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.served import echo_model

LIMITS = Limits(max_model_len=100)
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> Generation:
    body = json.dumps({"prompt": "hello"} | fields).encode()
    return understand_completion(body, echo_model(), LIMITS)


def chat(**fields: Any) -> Generation:
    body = json.dumps({"messages": HELLO} | fields).encode()
    return understand_chat(body, echo_model(), LIMITS)


BAD_FOR_BOTH: list[tuple[str, Any]] = [
    ("model", 5),
    ("prediction", "abc"),
    ("prediction", {"type": "content"}),
    ("prediction", {"type": "other", "content": "abc"}),
    ("prediction", {"type": "content", "content": [{"text": "abc"}]}),
    ("frequency_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2e-309),
    ("repetition_penalty", "1"),
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("n", 0),
    ("n", 17),
    ("n", 1.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", "1"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", "a" * 1025),
    ("stop", ["a", "b" * 1025]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", [2**40]),
    ("stop_token_ids", 5),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 10**9),
    ("max_tokens", "5"),
    ("min_tokens", -1),
    ("min_tokens", 99),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1000000": 1}),
    ("logit_bias", {"1" * 5000: 1}),
    ("logit_bias", {"1": "x"}),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", ["a" * 9000]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [10**6]),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", []),
    ("skip_special_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncation_side", "middle"),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("priority", 2**40),
    ("cache_salt", ""),
    ("cache_salt", "x" * 129),
    ("request_id", ""),
    ("return_token_ids", 1),
    ("add_special_tokens", "no"),
    ("user", 5),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("use_beam_search", 0),
    ("beam_width", 2),
    ("length_penalty", 0.5),
    ("early_stopping", True),
    ("early_stopping", "never"),
    ("return_tokens_as_token_ids", 1),
    ("audio", {}),
    ("logits_processors", ["x"]),
    ("moderation", {"model": "x"}),
    ("prompt_embeds", "x"),
    ("thinking_token_budget", 9),
    ("vllm_xargs", {"a": 1}),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", 1e9),
    ("timeout", "5"),
    ("max_token", 5),
    ("maxTokens", 5),
    ("Temperature", 1),
    ("temprature", 1),
    ("top-p", 1),
]

BAD_COMPLETIONS: list[tuple[str, Any]] = [
    *BAD_FOR_BOTH,
    ("prompt", None),
    ("prompt", 5),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [[]]),
    ("prompt", ["a", 1]),
    ("prompt", [[1], "a"]),
    ("prompt", [1, [1]]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", [-1]),
    ("prompt", [10**6]),
    ("prompt", [[[1]]]),
    ("prompt", ["a"] * 1025),
    ("prompt", {"text": "a"}),
    ("prompt", "x" * 100),
    ("best_of", 0),
    ("best_of", 17),
    ("suffix", "end"),
    ("echo", 1),
    ("logprobs", 21),
    ("logprobs", True),
    ("messages", HELLO),
    ("max_completion_tokens", 5),
]

BAD_CHATS: list[tuple[str, Any]] = [
    *BAD_FOR_BOTH,
    ("messages", None),
    ("messages", []),
    ("messages", "hello"),
    ("messages", [5]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "root", "content": "x"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "assistant", "content": "", "tool_calls": [{}]}]),
    ("messages", [{"role": "user", "content": "x" * 100}]),
    ("logprobs", 5),
    ("top_logprobs", 5),
    ("max_completion_tokens", 0),
    ("echo", 1),
    ("prompt", "hello"),
    ("best_of", 2),
    ("chat_template", "{{ 'mine' }}"),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", 5),
    ("add_special_tokens", True),
]


@pytest.mark.parametrize(("field", "value"), BAD_COMPLETIONS, ids=lambda x: repr(x)[:40])
def test_what_is_wrong_in_a_completion_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert field in caught.value.message


@pytest.mark.parametrize(("field", "value"), BAD_CHATS, ids=lambda x: repr(x)[:40])
def test_what_is_wrong_in_a_chat_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert field in caught.value.message


def test_an_image_is_refused_with_what_there_is_instead() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(ApiError, match="'image_url'; only parts of type text are supported"):
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"[]",
        b"null",
        b'{"prompt": "a"} x',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00 and more"}',
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt": ' * 100_000,
        b'{"prompt": "a", "temperature": 1, "temperature": 2}',
        b'{"prompt": "a", "stream": true, "stream_options": {"x": 1, "x": 2}}',
        json.dumps({f"x{i}": i for i in range(MAX_FIELDS + 1)}).encode(),
    ],
    ids=lambda content: repr(content[:40]),
)
def test_bodies_that_are_no_acceptable_json(content: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(content, CompletionBody)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [[104, 105]]),
        (["hi", "a"], [[104, 105], [97]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, expected: list[list[int]]) -> None:
    generation = completion(prompt=prompt, n=2)
    assert generation.prompts == expected
    assert [unpack_ints(s.prompt).tolist() for s in generation.submits] == expected
    indices = [state.index for submit in generation.submits for state in submit.choices]
    assert indices == list(range(2 * len(expected)))
    assert len({submit.request for submit in generation.submits}) == len(expected)


def test_absent_and_null_are_the_same() -> None:
    fields = dict.fromkeys(msgspec.structs.asdict(CompletionBody(prompt="x")))
    fields.pop("prompt")
    params = completion(**fields, suffix=None, tools=None).params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1, 1, 0)
    assert params.eos_token_ids == echo_model().manifest.eos_token_ids


def test_seeds_are_drawn_or_taken() -> None:
    assert completion(seed=-1).params.seed == 2**64 - 1
    assert completion(seed=5).params.seed == 5
    assert completion().params.seed != completion().params.seed


def test_parameters_arrive_as_they_are_meant() -> None:
    params = completion(
        top_k=-1,
        ignore_eos=True,
        logit_bias={"5": 1000, "6": -0.5},
        bad_words=["hi"],
        allowed_token_ids=[1, 2],
        stop_token_ids=[7],
        min_tokens=3,
        logprobs=2,
        echo=True,
    ).params
    assert params.top_k == 0
    assert params.eos_token_ids == ()
    assert params.logit_bias == {5: 100, 6: -0.5}
    assert params.bad_words == ((104, 105), (32, 104, 105))
    assert params.allowed_token_ids == (1, 2)
    assert params.stop_token_ids == (7,)
    assert (params.min_tokens, params.logprobs, params.prompt_logprobs) == (3, 2, 2)


def test_best_of_needs_logprobs_to_rank_and_no_stream() -> None:
    generation = completion(best_of=3, n=2)
    assert len(generation.submits[0].choices) == 3
    assert (generation.params.logprobs, generation.logprobs) == (0, None)
    with pytest.raises(ApiError, match="cannot be streamed"):
        completion(best_of=3, n=2, stream=True)
    with pytest.raises(ApiError, match="less than n"):
        completion(best_of=2, n=3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (3, 1.0, False)),
        ({"beam_width": 5, "length_penalty": -0.5, "early_stopping": True}, (5, -0.5, True)),
        ({"early_stopping": "never"}, (3, 1.0, None)),
        ({"use_beam_search": False, "n": 1}, (0, 1.0, False)),
    ],
)
def test_a_beam_search(fields: dict[str, Any], expected: tuple[int, float, bool | None]) -> None:
    for understood in (completion, chat):
        generation = understood(**{"use_beam_search": True, "n": 3} | fields)
        params = generation.params
        assert (params.beam_width, params.length_penalty, params.early_stopping) == expected
        assert len(generation.submits[0].choices) == generation.n


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 1),
        ("beam_width", 17),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("length_penalty", "long"),
        ("stop", "x"),
        ("best_of", 3),
        ("logit_bias", {"5": 1}),
        ("allowed_token_ids", [5]),
        ("bad_words", ["no"]),
        ("min_tokens", 2),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("stop_token_ids", list(range(100))),
    ],
)
def test_what_a_beam_search_cannot_do_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**{"use_beam_search": True, "n": 2, field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize(
    ("field", "fields"),
    [("n", {}), ("best_of", {}), ("beam_width", {"use_beam_search": True})],
)
def test_a_server_may_give_fewer_choices(field: str, fields: dict[str, Any]) -> None:
    def understood(count: int) -> Generation:
        body = json.dumps({"prompt": "hello", field: count} | fields).encode()
        return understand_completion(body, echo_model(), Limits(100, max_choices=3))

    assert understood(3).submits
    with pytest.raises(ApiError) as caught:
        understood(4)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_lengths() -> None:
    assert completion(prompt="x" * 90).params.max_tokens == 10
    assert completion(prompt="x" * 90, max_tokens=10).params.max_tokens == 10
    assert completion(prompt="x" * 99, max_tokens=0, echo=True).params.max_tokens == 0
    with pytest.raises(ApiError) as caught:
        completion(prompt="x" * 90, max_tokens=11)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(ApiError, match=r"has 101 and leaves no room for an answer\.") as caught:
        completion(prompt="x" * 101)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    generation = chat()
    assert generation.params.max_tokens == 100 - len(generation.prompts[0])
    assert chat(max_completion_tokens=5, max_tokens=5).params.max_tokens == 5
    with pytest.raises(ApiError, match="differ"):
        chat(max_completion_tokens=5, max_tokens=6)


@pytest.mark.parametrize(
    ("keep", "side", "expected"),
    [(3, None, "llo"), (3, "right", "hel"), (-1, None, "hello"), (9, "left", "hello")],
)
def test_truncation(keep: int, side: str | None, expected: str) -> None:
    generation = completion(truncate_prompt_tokens=keep, truncation_side=side, echo=True)
    assert bytes(generation.prompts[0]).decode() == expected
    assert generation.echo == [expected]


def test_a_long_prompt_is_truncated_to_what_fits() -> None:
    generation = completion(prompt="x" * 150, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(generation.prompts[0]) == 90


def test_no_truncation_makes_room_for_more_tokens_than_there_are() -> None:
    with pytest.raises(ApiError, match="maximum context length") as raised:
        completion(truncate_prompt_tokens=-1, max_tokens=1000)
    assert raised.value.param == "max_tokens"


def test_a_chat_is_rendered_and_its_special_tokens_are_text() -> None:
    parts = [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>"}]
    (prompt,) = chat(messages=[{"role": "user", "content": parts}]).prompts
    model = echo_model()
    assert model.tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\na<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    (end,) = model.manifest.eos_token_ids[-1:]
    assert prompt.count(end) == 1


def test_a_chat_may_go_on_with_its_last_message() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once"}]
    (prompt,) = chat(messages=messages, continue_final_message=True).prompts
    assert bytes(prompt[-5:]) == b"\nOnce"
    with pytest.raises(ApiError, match="exclude each other"):
        chat(messages=messages, continue_final_message=True, add_generation_prompt=True)


def test_another_model_is_not_found() -> None:
    with pytest.raises(ApiError) as caught:
        completion(model="other")
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert completion(model="echo").model == "echo"


def test_unknown_fields_are_ignored_and_named() -> None:
    generation = completion(zork=1, store=True, metadata={"a": "b"}, other_thing=None)
    assert generation.ignored == ["zork", "store", "metadata"]


def test_fields_of_a_search_may_say_what_is_so_without_one() -> None:
    asked = completion(use_beam_search=False, length_penalty=1, early_stopping=False, beam_width=1)
    assert asked.params.beam_width == 0


def test_unsupported_fields_may_say_what_is_true_anyway() -> None:
    neutral = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    for body, asked in ((EmbeddingBody, {"input": "a"}), (DetokenizeBody, {"tokens": []})):
        assert parse(json.dumps(asked | neutral).encode(), body).ignored == []


RAG = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}"
DOCUMENTS = [{"title": "Pages", "text": "<|im_start|>system"}]


def test_documents_are_shown_by_templates_that_have_a_place_for_them(tmp_path: Path) -> None:
    folder = prepare("echo", tmp_path)
    template = folder / CHAT_TEMPLATE_FILE
    template.write_text(RAG + template.read_text())
    model = ServedModel.load(folder)
    body = msgspec.json.encode({"messages": HELLO, "documents": DOCUMENTS})
    plain = msgspec.json.encode({"messages": HELLO})
    (ids,) = understand_chat(body, model, LIMITS).prompts
    (without,) = understand_chat(plain, model, LIMITS).prompts
    assert bytes(ids[: -len(without)]) == b"Pages: <|im_start|>system\n"


@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": t} for t in ("a", "bc")]])
def test_a_prediction_goes_with_every_prompt(content: Any) -> None:
    prediction = {"type": "content", "content": content}
    several = completion(prompt=["one", "two"], prediction=prediction)
    for submit in (*several.submits, *chat(prediction=prediction).submits):
        assert bytes(list(unpack_ints(submit.prediction))) == b"abc"
    assert not chat().submits[0].prediction


def test_documents_that_nobody_would_see_are_refused() -> None:
    for documents, refused in ((DOCUMENTS, True), ([], False)):
        body = msgspec.json.encode({"messages": HELLO, "documents": documents})
        with pytest.raises(ApiError, match="no place") if refused else nullcontext():
            understand_chat(body, echo_model(), LIMITS)


@pytest.mark.parametrize(
    ("most", "fields", "refused"),
    [
        (2, {"prompt": "a", "logprobs": 2, "prompt_logprobs": 1}, None),
        (2, {"prompt": "a", "logprobs": 3}, "logprobs"),
        (2, {"prompt": "a", "prompt_logprobs": 3}, "prompt_logprobs"),
        (0, {"messages": HELLO, "logprobs": True}, None),
        (0, {"messages": HELLO, "logprobs": True, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_a_server_may_allow_fewer_alternatives(
    most: int, fields: dict[str, Any], refused: str | None
) -> None:
    understand = understand_completion if "prompt" in fields else understand_chat
    limits = Limits(max_model_len=100, max_logprobs=most)
    with pytest.raises(ApiError) if refused else nullcontext() as raised:
        understand(json.dumps(fields).encode(), echo_model(), limits)
    assert raised is None or raised.value.param == refused


def test_salts_separate_tenants() -> None:
    pairs = [(None, "a"), (b"a", None), (b"a", "b"), (b"ab", None), (None, "ab"), (b"b", "a")]
    assert len({prefix_salt(key, salt) for key, salt in pairs}) == len(pairs)
    assert prefix_salt(None, None) == b""
    assert completion(cache_salt="a").submits[0].salt == prefix_salt(None, "a")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
UNDERSTOOD: dict[type[msgspec.Struct], Callable[[bytes, ServedModel, Limits], Generation]] = {
    CompletionBody: understand_completion,
    ChatBody: understand_chat,
    ResponseBody: understand_response,
    MessagesBody: understand_message,
    EmbeddingBody: understand_embedding,
}
FIELDS = sorted(
    {field.encode_name for body in UNDERSTOOD for field in msgspec.structs.fields(body)}
    | {*UNSUPPORTED, *MEANT}
)


@settings(max_examples=300, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=12), JSON, max_size=5),
    base=st.sampled_from(
        [
            *({}, {"prompt": "hello"}, {"input": "hello"}),
            *({"messages": HELLO}, {"messages": HELLO, "max_tokens": 5}),
        ]
    ),
)
def test_no_body_gives_anything_but_a_generation_or_an_api_error(
    fields: dict[str, Any], base: dict[str, Any]
) -> None:
    content = msgspec.json.encode(base | fields)
    for understand in UNDERSTOOD.values():
        with suppress(ApiError):
            assert all(understand(content, echo_model(), LIMITS).prompts)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_give_anything_but_an_api_error(content: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        understand_completion(content, echo_model(), LIMITS)
    assert caught.value.status == 400
