"""Answers: text, stop strings, logprobs, and that a stream's pieces are the whole answer."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pagefleet.wire import (
    Finish,
    Output,
    PromptOutput,
    Reason,
    Rejected,
    pack_ints,
    unpack_floats,
)
from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.cell.link import News
from pagefleet_gateway.errors import ApiError, unavailable
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.stream import DONE, Renderer
from pagefleet_gateway.requests.generation import Limits
from pagefleet_gateway.requests.understanding import understand_chat, understand_completion
from tests.unit.gateway.fake_scheduler import expected_logprob, logprobs_of
from tests.unit.gateway.served import echo_model

LIMITS = Limits(max_model_len=4096)
END = echo_model().manifest.eos_token_ids[-1]


def answer_to(kind: str = "completion", limits: Limits = LIMITS, **fields: Any) -> Answer:
    if kind == "completion":
        body = json.dumps({"prompt": "ab", "max_tokens": 999} | fields).encode()
        return Answer(understand_completion(body, echo_model(), limits), echo_model())
    messages = [{"role": "user", "content": "ab"}]
    body = json.dumps({"messages": messages} | fields).encode()
    return Answer(understand_chat(body, echo_model(), limits), echo_model())


def outputs(
    answer: Answer,
    texts: list[str | bytes],
    index: int = 0,
    finish: Finish = Finish.LENGTH,
    end: int | None = None,
) -> list[News]:
    """News that bring each text in one message; `end` is a last token."""
    width = answer.generation.params.logprobs
    news: list[News] = []
    position = 0
    for number, text in enumerate(texts, 1):
        tokens = list(text.encode() if isinstance(text, str) else text)
        last = number == len(texts)
        if last and end is not None:
            tokens.append(end)
        news.append(
            Output(
                answer.prompt_of(index).request,
                1,
                index,
                position,
                pack_ints(tokens),
                None if width is None else logprobs_of(tokens, width),
                finish if last else None,
                cached=1,
            )
        )
        position += len(tokens)
    return news


def prompt_news(answer: Answer) -> list[News]:
    """Logprobs of every prompt."""
    width = answer.generation.params.prompt_logprobs
    assert width is not None
    return [
        PromptOutput(prompt.request, 1, 1, logprobs_of(prompt.tokens[1:], width))
        for prompt in answer.prompts
        if len(prompt.tokens) > 1
    ]


def whole(answer: Answer, news: list[News]) -> Any:
    """The JSON body after all the news."""
    renderer = Renderer(answer, echo_model())
    pieces = answer.take(news)
    assert answer.finished
    return json.loads(renderer.whole(pieces))


def streamed(answer: Answer, news: list[News]) -> list[Any]:
    """The chunks of the stream, one message of news at a time; checks its form."""
    renderer = Renderer(answer, echo_model())
    content = renderer.start()
    for item in news:
        content += renderer.events(answer.take([item]))
        if answer.finished:
            break
    *events, done, rest = content.split(b"\n\n")
    assert (done + b"\n\n", rest) == (DONE, b"")
    assert all(event.startswith(b"data: ") for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def test_a_whole_completion() -> None:
    answer = answer_to(request_id="x")
    assert whole(answer, outputs(answer, ["héllo", " you"])) == {
        "id": "cmpl-x",
        "object": "text_completion",
        "created": answer.generation.created,
        "model": "echo",
        "choices": [
            {
                "index": 0,
                "text": "héllo you",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 10,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_a_whole_chat() -> None:
    answer = answer_to("chat", request_id="x")
    body = whole(answer, outputs(answer, ["hi"], finish=Finish.STOP, end=END))
    assert (body["id"], body["object"]) == ("chatcmpl-x", "chat.completion")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_fingerprint_tells_what_computed_an_answer(kind: str) -> None:
    def told(*numerics: int, stream: bool = False) -> list[str | None]:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = answer_to(kind, n=len(numerics), stream=stream, **options)
        news = [
            structs.replace(item, numerics=each)
            for index, each in enumerate(numerics)
            for item in outputs(answer, ["a", "b"], index)
            if isinstance(item, Output)
        ]
        bodies = streamed(answer, news) if stream else [whole(answer, news)]
        return [body.get("system_fingerprint") for body in bodies]

    (same,) = told(7, 7)
    assert same is not None
    assert told(7) == [same]
    assert told(8) != [same]
    assert told(7, 8) not in ([same], told(8))
    assert told(0) == [None]
    *before, end, usage = told(7, stream=True)
    assert {*before} == {None}
    assert end == usage == same


def test_a_chat_stream() -> None:
    options = {"include_usage": True}
    answer = answer_to("chat", n=2, stream=True, stream_options=options)
    news = outputs(answer, ["he", "y"]) + outputs(answer, ["you"], 1, Finish.STOP, END)
    chunks = streamed(answer, news)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 5
    seen = [
        (choice["index"], choice["delta"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert seen == [
        (0, {"role": "assistant", "content": ""}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (0, {"content": "he"}, None),
        (0, {"content": "y"}, "length"),
        (1, {"content": "you"}, "stop"),
    ]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_events_of_text_alone_are_written_like_all_others(kind: str, include_usage: bool) -> None:
    options = {"include_usage": include_usage}
    name = '"\\u0000" \0 "text":"'
    answer = answer_to(kind, stream=True, request_id=name, stream_options=options, n=2)
    texts = ["first", '"\\\n\0é"', "third", "end"]
    news = [*outputs(answer, texts), *outputs(answer, texts, 1)]
    chunks = streamed(answer, news)
    without_text = []
    for chunk in chunks[: -1 if include_usage else None]:
        (choice,) = chunk["choices"]
        said = choice if kind == "completion" else choice["delta"]
        if said.pop("text", said.pop("content", "")) in texts[:3]:
            without_text.append(chunk)
    assert without_text[0]["id"].endswith(name)
    assert without_text[0] == without_text[1] == without_text[2]
    assert without_text[3] == without_text[4] == without_text[5]
    assert [chunk["choices"][0]["index"] for chunk in without_text] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_no_text_ends_the_line_of_its_event(kind: str, logprobs: bool) -> None:
    asked = {"logprobs": 1 if kind == "completion" else True} if logprobs else {}
    answer = answer_to(kind, stream=True, **asked)
    renderer = Renderer(answer, echo_model())
    content, text = renderer.start(), "\x85 \u2028 \u2029"
    for item in outputs(answer, [text, text, text]):
        content += renderer.events(answer.take([item]))
    lines = [line for line in content.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    said = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [one.get("text") or one.get("delta", {}).get("content") or "" for one in said]
    assert "".join(texts) == 3 * text


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_chat_echoes_the_message_that_it_continues(role: str) -> None:
    messages = [{"role": "user", "content": "Well?"}, {"role": role, "content": "Once"}]
    fields = {"messages": messages, "echo": True, "continue_final_message": True}
    text = "Once upon" if role == "assistant" else " upon"
    answer = answer_to("chat", **fields)
    (choice,) = whole(answer, outputs(answer, [" upon"]))["choices"]
    assert choice["message"]["content"] == text
    answer = answer_to("chat", **fields, stream=True)
    deltas = [
        chunk["choices"][0]["delta"] for chunk in streamed(answer, outputs(answer, [" u", "pon"]))
    ]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == text


def test_usage_in_every_chunk() -> None:
    options = {"continuous_usage_stats": True}
    answer = answer_to(stream=True, stream_options=options)
    chunks = streamed(answer, outputs(answer, ["ab", "c"]))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 3]


def test_usage_is_counted_once_for_all_chunks_that_come_together() -> None:
    """Each of 16,000 chunks counted all choices: a body of 5 KB ended its gateway as hung."""

    class Counted(list[int]):
        counts = 0

        def __len__(self) -> int:
            type(self).counts += 1
            return super().__len__()

    options = {"continuous_usage_stats": True}
    answer = answer_to(prompt=["ab"] * 200, n=10, stream=True, stream_options=options)
    answer.prompts[0].tokens = Counted(answer.prompts[0].tokens)
    news = [item for index in answer.choices for item in outputs(answer, ["a"], index)]
    events = Renderer(answer, echo_model()).events(answer.take(news))
    assert events.count(b'"completion_tokens":2000,') == 2000
    assert Counted.counts < 20


def test_a_stream_without_usage_does_not_speak_of_it() -> None:
    answer = answer_to(stream=True)
    assert all("usage" not in chunk for chunk in streamed(answer, outputs(answer, ["a", "b"])))


def test_incomplete_characters_wait_and_are_replaced_at_the_end() -> None:
    answer = answer_to(stream=True)
    euro = "€".encode()
    chunks = streamed(answer, outputs(answer, [euro[:1], euro[1:2], euro[2:], euro[:2]]))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["€", "\ufffd"]


def test_a_stop_string_over_chunks_cuts_text_tokens_and_logprobs() -> None:
    answer = answer_to(stop=["STOP", "never"], logprobs=0, stream=True)
    news = outputs(answer, ["one S", "T", "OP two", "three"])
    pieces = answer.take(news)
    assert list(answer.cut_choices(pieces)) == [(answer.prompts[0].request, 0)]
    (piece,) = pieces.values()
    assert (piece.text, piece.finish, piece.stop_reason) == ("one ", "stop", "STOP")
    assert bytes(entry.token for entry in piece.entries) == b"one "
    assert answer.usage.completion_tokens == len("one STOP")


def test_a_stop_string_may_be_part_of_the_answer() -> None:
    answer = answer_to(stop="STOP", include_stop_str_in_output=True, logprobs=0)
    (choice,) = whole(answer, outputs(answer, ["one STOP"]))["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "one STOP"


def test_what_only_begins_like_a_stop_string_is_given_out_at_the_end() -> None:
    answer = answer_to(stop="STOP", logprobs=0)
    (choice,) = whole(answer, outputs(answer, ["one STO"]))["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "one STO"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a!")])
def test_a_stop_token_is_named(include: bool, text: str) -> None:
    answer = answer_to(stop_token_ids=[33], include_stop_str_in_output=include)
    (choice,) = whole(answer, outputs(answer, ["a"], finish=Finish.STOP, end=33))["choices"]
    assert (choice["text"], choice["stop_reason"]) == (text, 33)


def test_logprobs_of_a_completion() -> None:
    answer = answer_to(logprobs=1, echo=True)
    (choice,) = whole(answer, prompt_news(answer) + outputs(answer, ["é"]))["choices"]
    first, second = "é".encode()
    assert choice["text"] == "abé"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [None, *(expected_logprob(t) for t in (98, first, second))],
        "top_logprobs": [
            None,
            {"b": expected_logprob(98)},
            {"bytes:\\xc3": expected_logprob(first)},
            {"bytes:\\xa9": expected_logprob(second)},
        ],
        "text_offset": [0, 1, 2, 2],
    }


def test_logprobs_of_a_chat() -> None:
    answer = answer_to("chat", logprobs=True, top_logprobs=2)
    (choice,) = whole(answer, outputs(answer, ["a"]))["choices"]
    first, second = (
        {"token": chr(t), "logprob": expected_logprob(97) - k, "bytes": [t]}
        for k, t in enumerate((97, 98))
    )
    (token,) = choice["logprobs"]["content"]
    assert token == first | {"top_logprobs": [first, second]}


def test_logprobs_call_tokens_by_their_ids() -> None:
    answer = answer_to(logprobs=1, echo=True, return_tokens_as_token_ids=True)
    (choice,) = whole(answer, [*prompt_news(answer), *outputs(answer, [b"\xff"])])["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98", "token_id:255"]
    assert [*choice["logprobs"]["top_logprobs"][2]] == ["token_id:255"]
    answer = answer_to("chat", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    (choice,) = whole(answer, outputs(answer, ["c"]))["choices"]
    (token,) = choice["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:99", [99])
    assert [each["token"] for each in token["top_logprobs"]] == ["token_id:99", "token_id:100"]


def test_prompt_logprobs() -> None:
    answer = answer_to(prompt_logprobs=0, prompt=[[97, 98], [99]])
    news = [*prompt_news(answer), *outputs(answer, ["x"]), *outputs(answer, ["y"], 1)]
    first, second = whole(answer, news)["choices"]
    shown = {"98": {"logprob": expected_logprob(98), "rank": None, "decoded_token": "b"}}
    assert first["prompt_logprobs"] == [None, shown]
    assert second["prompt_logprobs"] == [None]


def test_minus_infinity_is_a_number_in_json() -> None:
    answer = answer_to(logprobs=0)
    (item,) = outputs(answer, ["a"])
    assert isinstance(item, Output)
    assert item.logprobs is not None
    assert unpack_floats(item.logprobs.chosen)[0] > -9999
    lowest = b"\x00\x00\x80\xff"
    item = Output(
        item.request, 1, 0, 0, item.tokens, type(item.logprobs)(lowest, b"", b""), Finish.LENGTH
    )
    (choice,) = whole(answer, [item])["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]


def test_only_the_prompt() -> None:
    answer = answer_to(max_tokens=0, echo=True, logprobs=0, stream=True)
    (chunk,) = streamed(answer, prompt_news(answer) + outputs(answer, [""]))
    (choice,) = chunk["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]


def test_the_best_choices_of_each_prompt_come_first() -> None:
    answer = answer_to(prompt=["ab", "cd"], n=2, best_of=3, stop="#")
    # expected_logprob falls with the token's number modulo 64: A (65) is likelier than B.
    texts = ["CC", "A#ZZ", "BB", "D", "F", "E"]
    news = [item for index, text in enumerate(texts) for item in outputs(answer, [text], index)]
    body = whole(answer, news)
    assert [choice["text"] for choice in body["choices"]] == ["A", "BB", "D", "E"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 2 + 2 + 2 + 1 + 1 + 1


def test_token_ids_are_shown_if_asked() -> None:
    answer = answer_to(return_token_ids=True, stream=True)
    euro = "€".encode()
    chunks = streamed(answer, outputs(answer, [euro[:1], euro[1:]]))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [list(euro[:1]), list(euro[1:])]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[97, 98], None]


@pytest.mark.parametrize(
    ("news", "status"),
    [
        (Rejected("r", 1, Reason.TOO_LONG, "long", "prompt"), 400),
        (Rejected("r", 1, Reason.INVALID, "bad"), 400),
        (Rejected("r", 1, Reason.OVERLOADED, "full"), 503),
        (Rejected("r", 1, Reason.NO_WORKER, "none"), 503),
        (Rejected("r", 1, Reason.FAILED, "broken"), 500),
        (Output("r", 1, 0, 0, b"", finish=Finish.ERROR), 500),
    ],
)
def test_refusals_and_failures_are_errors(news: News, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        answer_to().take([news])
    assert caught.value.status == status
    assert (caught.value.retry_after is not None) == (status == 503)


def test_an_error_in_a_stream_is_its_end() -> None:
    error = unavailable("No more.", "draining")
    content = Renderer(answer_to(), echo_model()).failure(error)
    event, end = content[: -len(DONE)], content[-len(DONE) :]
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "No more."
    assert end == DONE


@settings(max_examples=150, deadline=None)
@given(
    content=st.text("abcé€😀\n", max_size=12) | st.binary(max_size=12),
    stop=st.lists(st.text("abc€", min_size=1, max_size=3), max_size=2),
    logprobs=st.sampled_from([None, 0, 2]),
    echo=st.booleans(),
    include=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_stream_says_what_the_whole_answer_says(
    content: str | bytes,
    stop: list[str],
    logprobs: int | None,
    echo: bool,
    include: bool,
    seed: int,
) -> None:
    cut = random.Random(seed)
    raw = content.encode() if isinstance(content, str) else content
    parts: list[str | bytes] = []
    while raw:
        size = cut.randint(1, 4)
        parts.append(raw[:size])
        raw = raw[size:]
    parts.append(b"")
    fields = {
        "stop": stop,
        "logprobs": logprobs,
        "echo": echo,
        "include_stop_str_in_output": include,
    }

    def news(answer: Answer) -> list[News]:
        first = prompt_news(answer) if echo and logprobs is not None else []
        return first + outputs(answer, parts)

    at_once, in_pieces = answer_to(**fields), answer_to(**fields, stream=True)
    (choice,) = whole(at_once, news(at_once))["choices"]
    chunks = [chunk["choices"][0] for chunk in streamed(in_pieces, news(in_pieces))]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["stop_reason"] == choice["stop_reason"]
    assert in_pieces.usage == at_once.usage
    if logprobs is not None:
        for name, values in choice["logprobs"].items():
            assert [v for chunk in chunks for v in chunk["logprobs"][name]] == values
        if isinstance(content, str) and content.isascii():
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_joined_pieces() -> None:
    joined = Piece.joined([Piece("a", [], [1]), Piece("b", [], [2, 3], "stop", "x")])
    assert joined == Piece("ab", [], [1, 2, 3], "stop", "x")


def test_a_deadline_before_the_first_token_is_an_error() -> None:
    answer = answer_to(timeout=0.5)
    assert answer.generation.submits[0].left == 0.5
    with pytest.raises(ApiError) as caught:
        answer.take(outputs(answer, [""], finish=Finish.TIMEOUT))
    assert (caught.value.status, caught.value.param) == (504, "timeout")


def test_a_deadline_after_it_ends_the_choices() -> None:
    answer = answer_to(timeout=0.5, n=2)
    news = [
        *outputs(answer, ["abc", ""], 0, Finish.TIMEOUT),
        *outputs(answer, [""], 1, Finish.TIMEOUT),
    ]
    choices = whole(answer, news)["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("abc", "timeout"),
        ("", "timeout"),
    ]


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize(("strict", "finish"), [(False, "timeout"), (True, "length")])
def test_a_deadline_is_a_length_where_only_openai_is_spoken(
    kind: str, strict: bool, finish: str
) -> None:
    answer = answer_to(kind, Limits(max_model_len=4096, strict=strict))
    first, last = outputs(answer, ["so ", "far"], finish=Finish.TIMEOUT)
    answer.take([first])
    pieces = answer.take([last])
    assert (pieces[0].text, pieces[0].finish) == ("far", finish)
    assert answer.finished


def test_an_abort_is_an_error_where_only_openai_is_spoken() -> None:
    lenient, strict = answer_to(), answer_to(limits=Limits(max_model_len=4096, strict=True))
    assert lenient.take(outputs(lenient, [""], finish=Finish.ABORT))[0].finish == "abort"
    with pytest.raises(ApiError) as raised:
        strict.take(outputs(strict, [""], finish=Finish.ABORT))
    assert (raised.value.status, raised.value.code) == (400, "aborted")
