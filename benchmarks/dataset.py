"""Prompts of real text for `benchmarks.serve`, out of the Python that runs this.

    python -m benchmarks.dataset passage > passage.jsonl
    python -m benchmarks.serve --dataset-path passage.jsonl --no-ignore-eos

Its standard library is text that every machine has: documented functions, and source. The same seed
gives the same prompts with the same Python. The kinds differ in how much of an answer was in its
prompt, which is what drafting from earlier text lives on:

question
    What a function does, how to use it, how it compares: the answer's words are the model's own.
passage
    A docstring to repeat, correct, rewrite or summarize: much of the answer is in the prompt.
code
    Source to go on with, without a conversation: names come again, sentences hardly.
"""

import argparse
import ast
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from benchmarks.loadgen.prompts import Message, Prompt

QUESTIONS = (
    "What does `{name}` of Python's module `{module}` do, and when would I use it?",
    "Explain `{module}.{name}` to somebody who is new to Python.",
    "Write a short example that uses `{module}.{name}`, and explain it line by line.",
    "Which mistakes are often made with `{module}.{name}`, and how are they avoided?",
    "How does `{name}` of the module `{module}` compare with its alternatives?",
)
TASKS = (
    "Repeat the following text word for word.",
    "Correct the spelling and the grammar of the following text, and give it back whole.",
    "Rewrite the following text in simpler words.",
    "Summarize the following text in three sentences.",
    "List the most important statements of the following text.",
)

PASSAGE_WORDS = range(30, 150)
CODE_LINES = range(15, 45)


def main(argv: Sequence[str] | None = None) -> None:
    """Print as many prompts as `argv` asks for, one on a line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dataset",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--count", metavar="N", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(argv)
    rng = random.Random(options.seed)
    try:
        prompts = KINDS[options.kind](options.count, rng)
    except ValueError as error:
        parser.error(f"--count {options.count} of this kind cannot be had: {error}.")
    sys.stdout.buffer.write(msgspec.json.Encoder().encode_lines(prompts))


def questions(count: int, rng: random.Random) -> list[Prompt]:
    """Questions about `count` functions or classes, all different."""
    chosen = rng.sample(_functions(), count)
    return [
        _chat(rng.choice(QUESTIONS).format(module=module, name=name)) for module, name in chosen
    ]


def passages(count: int, rng: random.Random) -> list[Prompt]:
    """Tasks about `count` docstrings, all different and neither very short nor long."""
    chosen = rng.sample(_docstrings(), count)
    return [_chat(f"{rng.choice(TASKS)}\n\n{text}") for text in chosen]


def code(count: int, rng: random.Random) -> list[Prompt]:
    """`count` runs of lines, no two of which overlap."""
    pieces: list[tuple[str, ...]] = []
    for _, source in modules():
        lines = iter(source.splitlines(keepends=True))
        pieces += zip(*[lines] * CODE_LINES.stop, strict=False)
    chosen = rng.sample(pieces, count)
    return [Prompt("".join(piece[: rng.choice(CODE_LINES)])) for piece in chosen]


KINDS: dict[str, Callable[[int, random.Random], list[Prompt]]] = {
    "question": questions,
    "passage": passages,
    "code": code,
}


def modules() -> Iterator[tuple[str, str]]:
    """Name and source of every module of the standard library that is one public file."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        yield path.stem, path.read_text("utf-8")


def definitions(nodes: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """The documented public functions and classes among them."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node):
            yield node


@cache  # it takes seconds
def _functions() -> list[tuple[str, str]]:
    return [
        (module, node.name)
        for module, source in modules()
        for node in definitions(ast.parse(source).body)
    ]


@cache
def _docstrings() -> list[str]:
    nodes = (node for _, source in modules() for node in definitions(ast.walk(ast.parse(source))))
    texts = {ast.get_docstring(node) or "" for node in nodes}
    return sorted(text for text in texts if len(text.split()) in PASSAGE_WORDS)


def _chat(question: str) -> Prompt:
    return Prompt(messages=[Message("user", question)])


if __name__ == "__main__":
    main()
