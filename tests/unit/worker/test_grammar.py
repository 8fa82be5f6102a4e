import json
import random
import re
from array import array
from collections.abc import Sequence

import pytest
from llguidance import grammar_from

from pagefleet.params import MAX_FORCED_BYTES, Guide, SamplingParams
from pagefleet_worker.grammar import (
    MAX_COMPILED,
    MAX_COMPILED_CHARACTERS,
    DisobeyedError,
    GuideError,
)
from tests.byte_grammars import byte_grammars
from tests.echo_cell import EchoCell

END = 3
GRAMMARS = byte_grammars(200, (END, 4))
PATTERN = r"(ab{1,3}|c*d)(-[x-z]+)?"
LARK = 'start: value\nvalue: "(" value* ")" | /[a-c]{1,2}/'


@pytest.fixture
def draw() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def regex(pattern: str, to_end: bool = False) -> Guide:
    return Guide(grammar_from("regex", pattern), to_end)


def ids(text: bytes) -> "array[int]":
    return array("i", list(text))


def text(tokens: Sequence[int]) -> str:
    return bytes(list(tokens)).decode()


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]


def walk(guide: Guide, draw: random.Random, longest: int = 40) -> "array[int]":
    """A random text that the grammar allows, with its end if it came to one."""
    guided, tokens = GRAMMARS.begin(guide), array("i")
    while len(tokens) < longest and not {END, 4}.intersection(tokens):
        tokens.append(draw.choice(allowed(guided.mask(tokens))))
    return tokens


def test_what_a_mask_allows_is_what_the_pattern_says(draw: random.Random) -> None:
    for _ in range(30):
        tokens = walk(regex(PATTERN), draw)
        if tokens[-1] in (END, 4):
            assert re.fullmatch(PATTERN, text(tokens[:-1]))
    letters = set("abcd")
    assert {chr(t) for t in allowed(GRAMMARS.begin(regex(PATTERN)).mask(array("i")))} == letters - {
        "b"
    }


def test_only_ends_follow_a_complete_text() -> None:
    guided = GRAMMARS.begin(regex("ab"))
    for outputs in (b"ab", b"ab\3", b"ab\4", b"ab\3\3"):
        assert allowed(guided.mask(ids(outputs))) == [END, 4]


def test_an_end_that_is_ignored_waits_for_the_last_moment() -> None:
    pattern = "a{2,4}"
    assert END in allowed(GRAMMARS.begin(regex(pattern)).mask(ids(b"aa")))
    guided = GRAMMARS.begin(regex(pattern, to_end=True))
    assert allowed(guided.mask(ids(b"aa"))) == [ord("a")]
    assert allowed(guided.mask(ids(b"aaaa"))) == [END, 4]


@pytest.mark.parametrize("grammar", [grammar_from("regex", PATTERN), grammar_from("lark", LARK)])
def test_a_place_is_a_function_of_the_outputs(grammar: str, draw: random.Random) -> None:
    """However it goes on, back and elsewhere: drafts that were dropped leave no trace."""
    guide = Guide(grammar)
    moved = GRAMMARS.begin(guide)
    for _ in range(40):
        tokens = walk(guide, draw)
        tokens = tokens[: draw.randint(0, len(tokens))]
        assert moved.mask(tokens) == GRAMMARS.begin(guide).mask(tokens)


def test_outputs_that_the_grammar_does_not_allow(draw: random.Random) -> None:
    guided = GRAMMARS.begin(regex("abc"))
    with pytest.raises(DisobeyedError, match="token 120"):
        guided.mask(ids(b"ax"))
    assert allowed(guided.mask(ids(b"ab"))) == [ord("c")]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a"),
        ("regex", "(?=a)b"),
        ("lark", "start: missing"),
        ("json", '{"type": "nothing"}'),
        ("json", '{"not": {}}'),
    ],
)
def test_a_grammar_that_cannot_be_compiled(kind: str, text: str) -> None:
    for _ in range(2):
        with pytest.raises(GuideError, match=r"cannot be followed: .{5,}"):
            GRAMMARS.begin(Guide(grammar_from(kind, text)))  # type: ignore[arg-type]


def test_compiled_grammars_are_remembered_up_to_a_number() -> None:
    grammars = byte_grammars(200, (END,))
    first = grammars.prepare(regex("first"))
    for number in range(MAX_COMPILED - 1):
        grammars.prepare(regex(f"other {number}"))
    assert grammars.prepare(regex("first", to_end=True)) is first
    for number in range(MAX_COMPILED):
        grammars.prepare(regex(f"another {number}"))
    assert grammars.prepare(regex("first")) is not first


def test_compiled_grammars_are_remembered_up_to_a_length() -> None:
    grammars = byte_grammars(200, (END,))
    short, long = regex("short"), regex("long" * (MAX_COMPILED_CHARACTERS // 12))
    longer = regex("longer" * (MAX_COMPILED_CHARACTERS // 8))
    compiled = {guide: grammars.prepare(guide) for guide in (long, short, longer)}
    assert grammars.prepare(short) is compiled[short]
    assert grammars.prepare(longer) is compiled[longer]
    assert grammars.prepare(long) is not compiled[long]

    longest = regex("x" * 2 * MAX_COMPILED_CHARACTERS)
    assert grammars.prepare(longest) is grammars.prepare(longest)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GUIDES = (
    Guide(grammar_from("regex", PATTERN)),
    Guide(grammar_from("regex", "[a-z]{3,60}"), to_end=True),
    Guide(grammar_from("lark", LARK)),
    Guide(grammar_from("choice", '["yes", "no", "not at all, and never again"]')),
    Guide(grammar_from("json", json.dumps(SCHEMA))),
)


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize(
    ("blocks", "drafts", "host_blocks"), [(200, 3, 0), (24, 0, 30), (20, 2, 0)]
)
def test_guided_streams_are_what_they_would_be_alone(
    blocks: int, drafts: int, host_blocks: int, lookahead: bool, draw: random.Random
) -> None:
    """Whether preempted, swapped, forked, drafted, or moved from a worker that died."""
    cell = EchoCell(
        blocks=blocks, budget=16, drafts=drafts, host_blocks=host_blocks, lookahead=lookahead
    )
    workers = [cell.join() for _ in range(2)]
    for _ in range(24):
        params = SamplingParams(
            max_tokens=draw.randint(1, 40),
            seed=draw.randrange(2**64),
            temperature=draw.choice([0.0, 1.0]),
            frequency_penalty=draw.choice([0.0, 1.0]),
            eos_token_ids=(END,),
            logprobs=draw.choice([None, 2]),
            guide=draw.choice([*GUIDES, None]),
        )
        prompt = [draw.randrange(200) for _ in range(draw.randint(1, 20))]
        cell.submit(prompt, params, choices=draw.choice([1, 1, 3]))
    for _ in range(draw.randint(1, 30)):
        cell.step(draw.choice(workers))
    cell.kill(workers[0])
    cell.run()
    cell.compare()
    cell.assert_idle()
    for client in cell.clients.values():
        if client.submit.params.guide is GUIDES[0]:
            for tokens in client.tokens.values():
                complete = re.fullmatch(PATTERN, text(tokens).rstrip("\3"))
                assert complete or len(tokens) == client.submit.params.max_tokens


def test_drafts_that_break_the_grammar_are_dropped() -> None:
    """Where `ab` was often, it is drafted, though once a `c` must come and in the end a `d`."""
    guide = regex("(ab){12}c(ab){12}d")
    params = SamplingParams(max_tokens=60, seed=1, guide=guide, eos_token_ids=(END,))
    steps = {}
    for drafts in (0, 4):
        cell = EchoCell(drafts=drafts)
        cell.join()
        request = cell.submit([1, 2, 3], params)
        cell.run()
        cell.compare()
        assert (
            text(cell.clients[request].tokens[0]).rstrip("\3") == "ab" * 12 + "c" + "ab" * 12 + "d"
        )
        steps[drafts] = cell.steps
    assert 0 < cell.planner.speculation.kept < cell.planner.speculation.drafted
    assert steps[4] < steps[0] / 2


@pytest.mark.parametrize("first", ["", "[a-c]{2}", "q|r"])
def test_a_text_without_a_choice_has_a_length_that_is_still_cheap(first: str) -> None:
    head = array("i") if not first else walk(regex(first), random.Random(1))
    head = array("i", [token for token in head if token not in (END, 4)])
    longest = GRAMMARS.begin(regex(f"({first})x{{{MAX_FORCED_BYTES}}}"))
    assert allowed(longest.mask(head)) == [ord("x")]
    longer = GRAMMARS.begin(regex(f"({first})x{{{MAX_FORCED_BYTES + 1}}}"))
    with pytest.raises(GuideError, match=f"{MAX_FORCED_BYTES} bytes in a row"):
        longer.mask(head)


@pytest.mark.parametrize(
    ("pattern", "words"), [("(a", "unclosed group"), ("x[ab]c{20000}", "bytes in a row")]
)
def test_a_grammar_that_fails_ends_its_request_alone(pattern: str, words: str) -> None:
    cell = EchoCell()
    cell.join()
    bad = SamplingParams(max_tokens=8, seed=1, guide=Guide(grammar_from("regex", pattern)))
    failing = cell.submit([1, 2, 3], bad, choices=2)
    other = cell.submit([1, 2, 3], SamplingParams(max_tokens=8, seed=1))
    cell.run()
    assert cell.clients[other].finished
    rejected = cell.clients[failing].rejected
    assert rejected is not None
    assert words in rejected.text
    cell.assert_idle()
