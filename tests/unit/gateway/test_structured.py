"""What clients ask answers to read like: as a grammar, or a 400 that names the field."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pagefleet.params import MAX_GRAMMAR_CHARACTERS
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.understanding import understand_chat, understand_completion
from pagefleet_gateway.text.detokenizer import Detokenizer
from pagefleet_gateway.text.vocabulary import Vocabulary
from tests.byte_grammars import Bytes, byte_grammars
from tests.schemas import random_schema
from tests.unit.gateway.conftest import piece_tokenizer
from tests.unit.gateway.served import echo_model

LIMITS = Limits(max_model_len=100)
TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes(257, [256])), n_vocab=257, eos_token=[256])
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def completion(**fields: Any) -> Generation:
    body = json.dumps({"prompt": "hello"} | fields).encode()
    return understand_completion(body, echo_model(), LIMITS)


def chat(**fields: Any) -> Generation:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]} | fields).encode()
    return understand_chat(body, echo_model(), LIMITS)


def accepts(grammar: str, text: str) -> bool:
    """Whether the text is complete under the grammar."""
    matcher, tokens = LLMatcher(TOKENIZER, grammar, log_level=0), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def json_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def test_the_first_space_of_a_grammars_text_is_kept() -> None:
    """A vocabulary of pieces drops it where a text begins, and the answer would not obey."""
    tokenizer = piece_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    the, prompt = tokenizer.token_to_id("▁the"), [tokenizer.token_to_id("h")]
    for fields, text in (({}, "the"), ({"structured_outputs": {"regex": " the"}}, " the")):
        continues = chat(**fields).continues_prompt
        assert Detokenizer(vocabulary, prompt if continues else ()).push([the]) == text


@pytest.mark.parametrize("understand", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"response_format": json_schema(PERSON)}, '{\n  "age": 5\n}', '{"age": "5"}'),
        ({"structured_outputs": {"json": PERSON}}, '{"age": 5}', "{}"),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, '{"age": 5}', "{}"),
        ({"structured_outputs": {"regex": r"\d{3}-[a-c]+"}}, "123-abc", "12-a"),
        ({"structured_outputs": {"choice": ["yes", 'no "😀"\\']}}, 'no "😀"\\', "y"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root "b" | "c"'}}, "aacbb", "acbb"),
        ({"structured_outputs": {"grammar": 'start: "a" start "b" | /c+/'}}, "accb", "ac"),
    ],
)
def test_every_form_is_a_grammar(
    understand: Any, fields: dict[str, Any], good: str, bad: str
) -> None:
    params = understand(**fields).params
    assert params.eos_token_ids == echo_model().manifest.eos_token_ids
    assert not params.guide.to_end
    assert accepts(params.guide.grammar, good)
    assert not accepts(params.guide.grammar, bad)


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_text_is_not_guided(form: object) -> None:
    assert chat(response_format=form).params.guide is None


def test_an_ignored_end_is_still_the_end_of_a_complete_text() -> None:
    params = chat(structured_outputs={"regex": "a+"}, ignore_eos=True).params
    assert params.guide is not None
    assert params.guide.to_end
    assert params.eos_token_ids


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def wide(width: int) -> dict[str, Any]:
    names = [f"field {number}" for number in range(width)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json"}}, "json"),
        ({"response_format": {"type": "json_schema"}}, "missing"),
        ({"response_format": {"type": "text", "extra": 1}}, "extra"),
        ({"response_format": json_schema("string")}, "object"),
        ({"response_format": json_schema({"type": "nothing"})}, "nothing"),
        ({"response_format": json_schema({"not": {}})}, "not"),
        ({"response_format": json_schema(deep(300))}, "recursion"),
        ({"response_format": json_schema({"$ref": "http://a/b"})}, "http://a/b"),
        ({"response_format": json_schema({"$ref": "#"})}, "no text"),
        ({"response_format": json_schema(wide(1500))}, "items"),
        (
            {"response_format": json_schema({"type": "string", "minLength": 2, "maxLength": 1})},
            "minLength",
        ),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one"),
        ({"structured_outputs": {"json": "[1"}}, "json"),
        ({"structured_outputs": {"json": "[1]"}}, "json"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "look-around"),
        ({"structured_outputs": {"regex": ""}}, "regex"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "choice"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "missing"),
        ({"structured_outputs": {"grammar": "root ::= (" + "(" * 3000}}, "recursion"),
        ({"structured_outputs": {"grammar": 'start: "a" <|im_end|>'}}, "cannot say"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}}, "262144"),
        ({"structured_outputs": {"choice": ["b" * (MAX_GRAMMAR_CHARACTERS + 1)]}}, "262144"),
        ({"structured_outputs": {"regex": "ab{16384}"}}, "16384 bytes in a row"),
        ({"structured_outputs": {"json": {"const": "a" * 16384}}}, "16384 bytes in a row"),
        ({"structured_outputs": {"whitespace": True, "regex": "a"}}, "whitespace"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "exclude",
        ),
    ],
)
def test_what_no_worker_could_follow_names_its_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.status == 400
    assert caught.value.param == list(fields)[-1]
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_what_contradicts_a_grammar_is_refused() -> None:
    with pytest.raises(ApiError, match=r"does not go with structured_outputs") as caught:
        completion(structured_outputs={"regex": "a+"}, min_tokens=2)
    assert caught.value.param == "min_tokens"


def test_beams_obey_a_grammar_too() -> None:
    fields = {"structured_outputs": {"regex": "a+"}, "use_beam_search": True, "n": 2}
    params = completion(**fields).params
    assert params.beam_width == 2
    assert params.guide is not None


def test_a_long_choice_is_one_of_its_texts() -> None:
    texts = [f'Number {number} is a/[b] "choice".\n' for number in range(3000)]
    guide = completion(structured_outputs={"choice": texts}).params.guide
    assert guide is not None
    assert all(accepts(guide.grammar, text) for text in texts[::500])
    assert not accepts(guide.grammar, texts[5][:-1])


def test_workers_follow_what_the_gateway_takes() -> None:
    draw = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    grammars = byte_grammars(300, (256,))
    for _ in range(50):
        structure = echo_model().grammars.json(random_schema(draw), "response_format")
        grammars.begin(structure.guide(ignore_eos=False))
