"""Fields of bodies: null is absent wherever a field may be, and those of others are told of."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from msgspec.inspect import ListType, Metadata, StructType, Type, UnionType, type_info

from pagefleet_gateway.bodies.embedding_body import EmbeddingBody
from pagefleet_gateway.bodies.messages_body import CountBody, MessagesBody
from pagefleet_gateway.bodies.other_fields import MEANT, UNSUPPORTED, is_ignored
from pagefleet_gateway.bodies.parsing import MAX_CONTAINERS, parse
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import ChatBody, CompletionBody
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.tokenizing import DetokenizeBody, TokenizeBody


def structs(info: Type) -> Iterator[type[msgspec.Struct]]:
    """All that a body may consist of."""
    match info:
        case StructType():
            yield info.cls
            for field in info.fields:
                yield from structs(field.type)
        case UnionType():
            for each in info.types:
                yield from structs(each)
        case ListType():
            yield from structs(info.item_type)
        case Metadata():
            yield from structs(info.type)


BODIES: list[type[msgspec.Struct]] = [
    *(CompletionBody, ChatBody, ResponseBody, MessagesBody, CountBody, EmbeddingBody),
    *(TokenizeBody, DetokenizeBody),
]


def fields(body: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(body)}


@pytest.mark.parametrize("body", BODIES)
def test_what_may_be_absent_may_be_null(body: type[msgspec.Struct]) -> None:
    found = set(structs(type_info(body)))
    assert body in found
    for struct in found:
        for field in msgspec.structs.fields(struct):
            if not field.required:
                assert msgspec.convert(None, field.type) is None, f"{struct}.{field.name}"


ASKED: dict[type[msgspec.Struct], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
    ResponseBody: {"input": "a"},
}
NEAR: list[tuple[str, dict[type[msgspec.Struct], str]]] = [
    ("conversation_id", {ResponseBody: "conversation"}),
    ("prompt_id", {CompletionBody: "prompt"}),
    ("inputs", {ResponseBody: "input"}),
    ("message", {ChatBody: "messages"}),
    ("temprature", dict.fromkeys(ASKED, "temperature")),
    ("sufix", dict.fromkeys(ASKED, "suffix")),
    ("guided_json", dict.fromkeys(ASKED, "structured_outputs.json")),
    ("guided_choice", dict.fromkeys(ASKED, "structured_outputs.choice")),
    ("chat_id", {}),
    ("speed", {}),
    ("models", {}),
    ("reasoning_format", {}),
]


@pytest.mark.parametrize("body", ASKED)
@pytest.mark.parametrize(("name", "meant"), NEAR)
def test_only_names_near_to_those_of_the_route_are_refused(
    body: type[msgspec.Struct], name: str, meant: dict[type[msgspec.Struct], str]
) -> None:
    content = json.dumps(ASKED[body] | {name: "x"}).encode()
    if body not in meant:
        assert parse(content, body).ignored == [name]
        return
    with pytest.raises(ApiError, match=rf"is {meant[body]} meant\?") as caught:
        parse(content, body)
    assert (caught.value.param, caught.value.code) == (name, "unknown_field")


@pytest.mark.parametrize("body", BODIES)
def test_a_field_of_another_route_is_ignored_unless_that_would_be_wrong(
    body: type[msgspec.Struct],
) -> None:
    for name in set().union(*map(fields, BODIES), MEANT, UNSUPPORTED):
        assert not is_ignored(name, None, body), name
        if name in fields(body):
            assert not is_ignored(name, object(), body), name
            continue
        meant = [each for each in MEANT.get(name, ()) if each.partition(".")[0] in fields(body)]
        if not meant and name not in UNSUPPORTED:
            assert is_ignored(name, object(), body), name
            continue
        words = rf"{meant[0]} meant" if meant else "not supported"
        with pytest.raises(ApiError, match=words) as error:
            is_ignored(name, object(), body)
        assert (error.value.status, error.value.param) == (400, name)
        assert error.value.code == ("unknown_field" if meant else "unsupported")


def test_what_is_meant_is_there_and_does_as_much() -> None:
    for names in MEANT.values():
        for name in names:
            first, _, rest = name.partition(".")
            (body, *_) = [each for each in BODIES if first in fields(each)]
            (info,) = [each for each in msgspec.structs.fields(body) if each.encode_name == first]
            inner = set().union(*map(fields, structs(type_info(info.type)))) if rest else {""}
            assert rest in inner, name


def test_a_part_of_another_type_is_told_which_there_are() -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    with pytest.raises(ApiError, match="input_text") as caught:
        parse(json.dumps({"input": said}).encode(), ResponseBody)
    assert caught.value.param == "input[0].content[0]"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [({"k" * 65: "v"}, "length <= 64"), ({"k": 5}, "got `int`"), ({"k": "v" * 513}, "<= 512")],
)
def test_what_is_wrong_in_a_mapping_names_its_field(metadata: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse(json.dumps({"input": "a", "metadata": metadata}).encode(), ResponseBody)
    assert caught.value.param == "metadata"


def test_a_tool_has_a_name_without_a_line_break() -> None:
    for name in ("f\n", "\nf", "f\n\n", "f g", "", "f" * 65):
        for tool in ({"name": name}, {"function": {"name": name}}):
            body = ChatBody if "function" in tool else ResponseBody
            asked = ASKED[body] | {"tools": [{"type": "function"} | tool]}
            with pytest.raises(ApiError, match="matching regex") as caught:
                parse(json.dumps(asked).encode(), body)
            assert caught.value.param == "tools"


@pytest.mark.parametrize("items", [b"[[]],", b'{"a":{}},'])
def test_a_body_of_a_million_lists_is_refused_before_any_is_made(items: bytes) -> None:
    """690,000 of them kept all others of their gateway waiting for 1.9 s."""
    for number, taken in ((MAX_CONTAINERS // 2 - 10, True), (MAX_CONTAINERS // 2 + 10, False)):
        content = b'{"prompt":"a","metadata":[' + items * number + b"0]}"
        with nullcontext() if taken else pytest.raises(ApiError, match="100000 lists"):
            parse(content, CompletionBody)


@pytest.mark.parametrize("text", ["[" * 300_000, '\\"{' * 100_000, '[{"\\\\' * 60_000])
def test_brackets_in_texts_are_no_lists(text: str) -> None:
    parsed = parse(json.dumps({"prompt": text, "stop": ["[", "]"]}).encode(), CompletionBody)
    assert parsed.body.prompt == text
