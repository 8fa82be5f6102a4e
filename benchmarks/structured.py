"""What guiding costs: compiling a grammar, and the mask of one token, by llguidance and xgrammar.

    python benchmarks/structured.py FOLDER

FOLDER is a prepared model (the last line of `python -m pagefleet_worker.prepare MODEL`). Each
grammar is compiled by a fresh compiler and then walked along a text that it allows, token by token
as the model's tokenizer cuts it; a mask is taken before every token. xgrammar is no dependency of
ours: `pip install xgrammar` to compare with it, or without it see llguidance alone.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import llguidance
import torch
from tokenizers import Tokenizer

from pagefleet.manifest import TOKENIZER_FILE, Manifest

COMPILATIONS = 5
"""Compilations of which the median and the worst are shown."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string", "maxLength": 100} for i in range(100)},
    "required": [f"field_{i}" for i in range(100)],
    "additionalProperties": False,
}
EXPRESSION_LARK = """
start: expr
expr: term (("+" | "-") term)*
term: NUMBER | "(" expr ")"
NUMBER: /[0-9]+/
"""
EXPRESSION_GBNF = """
root ::= expr
expr ::= term (("+" | "-") term)*
term ::= [0-9]+ | "(" expr ")"
"""


@dataclass(frozen=True)
class Case:
    """A grammar in the notations of both libraries, and a text that it allows."""

    name: str
    kind: str
    text: str
    sample: str
    gbnf: str | None = None


def cases() -> Iterator[Case]:
    """Grammars of all kinds, small and large."""
    person = {
        "name": "Ada Lovelace",
        "age": 36,
        "tags": ["red", "blue"],
        "address": {"street": "12 St James's Square, London", "zip": "SW1Y 4JH"},
    }
    wide = {f"field_{i}": f"some text of field {i}" for i in range(100)}
    yield Case("any JSON object", "json", '{"type": "object"}', json.dumps(person))
    yield Case("schema, 6 fields", "json", json.dumps(PERSON), json.dumps(person))
    yield Case("schema, 100 fields", "json", json.dumps(WIDE), json.dumps(wide))
    yield Case("regex", "regex", r"[a-z.]{3,20}@[a-z]+\.(com|org)", "ada.lovelace@example.org")
    choices = [f"The answer is number {i}." for i in range(100)]
    yield Case("choice of 100", "choice", json.dumps(choices), choices[73])
    yield Case(
        "expressions",
        "lark",
        EXPRESSION_LARK,
        "+".join(["((12+34)-(5-(67+890)))"] * 4),
        EXPRESSION_GBNF,
    )


class Walker(Protocol):
    """A compiled grammar at its start."""

    def mask(self) -> None:
        """Compute which tokens may come."""

    def take(self, token: int) -> bool:
        """Go on with one; whether it may come."""


class LlguidanceWalker:
    """With the library's default limits."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, case: Case) -> None:
        grammar = llguidance.grammar_from(case.kind, case.text)  # type: ignore[arg-type]
        self._matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def mask(self) -> None:
        """As bytes."""
        self._matcher.compute_bitmask()

    def take(self, token: int) -> bool:
        """Consume it."""
        return self._matcher.consume_token(token)


class XgrammarWalker:
    """Of a compiler without a cache."""

    def __init__(self, xgrammar: Any, info: Any, case: Case) -> None:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiled = {
            "json": lambda: compiler.compile_json_schema(case.text),
            "regex": lambda: compiler.compile_regex(case.text),
            "choice": lambda: compiler.compile_grammar(
                "root ::= " + " | ".join(json.dumps(text) for text in json.loads(case.text))
            ),
            "lark": lambda: compiler.compile_grammar(case.gbnf),
        }[case.kind]()
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def mask(self) -> None:
        """Into a tensor."""
        self._matcher.fill_next_token_bitmask(self._bitmask)

    def take(self, token: int) -> bool:
        """Accept it."""
        return bool(self._matcher.accept_token(token))


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(name: str, case: Case, tokens: list[int], compile: Callable[[Case], Walker]) -> None:
    """One line: compilation, then masks along the case's text."""
    compilations = [seconds_of(lambda: compile(case)) * 1e3 for _ in range(COMPILATIONS)]
    walker, masks = compile(case), []
    for token in tokens:
        masks.append(seconds_of(walker.mask) * 1e6)
        assert walker.take(token), f"{name} refuses a token of {case.name}"
    first = masks[0]
    masks.sort()
    print(
        f"{case.name:20} {name:11} {statistics.median(compilations):8.2f} {max(compilations):8.2f}"
        f" {len(tokens):7} {first:8.1f} {statistics.median(masks):8.1f} {masks[-1]:8.1f}"
        f" {statistics.median(compilations) + sum(masks) / 1e3:9.2f}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a prepared model")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    manifest, file = Manifest.load(folder), str(folder / TOKENIZER_FILE)
    tokenizer, size = Tokenizer.from_file(file), manifest.vocab_size
    ends = list(manifest.eos_token_ids)
    ours = llguidance.LLTokenizer(file, n_vocab=size, eos_token=ends)
    libraries: dict[str, Callable[[Case], Walker]] = {
        "llguidance": lambda case: LlguidanceWalker(ours, case)
    }
    if importlib.util.find_spec("xgrammar"):
        xgrammar = importlib.import_module("xgrammar")
        vocabulary = [
            token for token, _ in sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
        ]
        info = xgrammar.TokenizerInfo(
            vocabulary, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=ends
        )
        libraries["xgrammar"] = lambda case: XgrammarWalker(xgrammar, info, case)
    else:
        print("xgrammar is not installed; llguidance alone:", file=sys.stderr)
    print(f"{manifest.name}: {size} tokens in the vocabulary")
    print(f"{'':32} {'compile ms':>17} {'':7} {'mask us':>26} {'all ms':>9}")
    print(f"{'grammar':20} {'library':11} {'median':>8} {'worst':>8}", end="")
    print(f" {'tokens':>7} {'first':>8} {'median':>8} {'worst':>8}")
    for case in cases():
        tokens = tokenizer.encode(case.sample, add_special_tokens=False).ids
        for name, compile in libraries.items():
            show(name, case, tokens, compile)


if __name__ == "__main__":
    main()
