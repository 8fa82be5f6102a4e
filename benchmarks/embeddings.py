"""Measure `/v1/embeddings` of any server that speaks OpenAI's API: texts and tokens a second.

    python -m benchmarks.embeddings --url http://127.0.0.1:8000 --shapes 1x1,1x32,32x1,4x64

A shape is so many clients, each with one request at a time, by so many texts in each request. All
texts are of random words and about equally long, and none is asked for twice, so that no prefix
cache helps. The answers come as base64, as the openai package asks for them. The exit status is 1
if any request failed.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.loadgen.answer import AnswerError, whole_body
from benchmarks.loadgen.load import Concurrency
from benchmarks.loadgen.metrics import percentile
from benchmarks.loadgen.prompts import RandomPrompts
from benchmarks.loadgen.recording import Recording, Server, record
from benchmarks.loadgen.workload import Request
from benchmarks.serve import first_model

_PATIENCE_SECONDS = 600.0


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: _Usage


@dataclass(frozen=True, slots=True)
class Shape:
    """So many clients, by so many texts in each request."""

    clients: int
    texts: int

    @classmethod
    def read(cls, text: str) -> "Shape":
        """As `CLIENTSxTEXTS` says it."""
        clients, _, texts = text.partition("x")
        return cls(int(clients), int(texts))

    def __str__(self) -> str:
        return f"{self.clients} x {self.texts}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = _parser().parse_args(argv)
    model = first_model(options.url)
    print("| clients x texts | texts/s | tokens/s | request p50 ms | p99 |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for shape in options.shapes:
        requests = _requests(shape, model, options.texts, options.tokens)
        recordings = asyncio.run(_offer(Server.at(options.url), shape, requests))
        try:
            print(_line(shape, recordings))
        except AnswerError as error:
            print(f"{shape}: {error.kind}: {error}", file=sys.stderr)
            return 1
    return 0


def _requests(shape: Shape, model: str, texts: int, tokens: int) -> list[Request]:
    count = max(texts // shape.texts, 2 * shape.clients)
    prompts = RandomPrompts().draw([tokens] * (count * shape.texts), random.getrandbits(32), "")
    inputs = [prompt.prompt for prompt in prompts]
    bodies = [
        {"model": model, "encoding_format": "base64", "input": inputs[start : start + shape.texts]}
        for start in range(0, len(inputs), shape.texts)
    ]
    return [Request("/v1/embeddings", msgspec.json.encode(body), 0, True) for body in bodies]


async def _offer(server: Server, shape: Shape, requests: list[Request]) -> list[Recording]:
    recordings: list[Recording] = []

    async def send(request: Request, due: float) -> None:
        recordings.append(await record(server, request, due, _PATIENCE_SECONDS))

    await Concurrency(shape.clients).offer(requests, send, random.Random())
    return recordings


def _line(shape: Shape, recordings: list[Recording]) -> str:
    """What came of a shape.

    Raises:
        AnswerError: an answer is not whole.
    """
    tokens = sum(_tokens(recording, shape) for recording in recordings)
    seconds = max(each.ended for each in recordings) - min(each.due for each in recordings)
    waits = sorted(1000 * (each.ended - each.due) for each in recordings)
    texts = len(recordings) * shape.texts
    return (
        f"| {shape} | {texts / seconds:.1f} | {tokens / seconds:.0f} "
        f"| {percentile(waits, 50):.0f} | {percentile(waits, 99):.0f} |"
    )


def _tokens(recording: Recording, shape: Shape) -> int:
    """The tokens of a request's texts, of each of which there is an embedding."""
    if recording.failure is not None:
        raise AnswerError(*recording.failure)
    body = whole_body(recording.connection, b"".join(recording.reads))
    answer = msgspec.json.decode(body, type=_Answer)
    if len(answer.data) != shape.texts:
        raise AnswerError("wrong count", f"{len(answer.data)} embeddings of {shape.texts} texts")
    return answer.usage.prompt_tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embeddings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server; default: %(default)s")
    add(
        "--shapes",
        type=lambda text: [Shape.read(each) for each in text.split(",")],
        default="1x1,1x32,32x1,4x64",
        metavar="CLIENTSxTEXTS,...",
        help="default: %(default)s",
    )
    add("--texts", type=int, default=256, help="of a shape, about; default: %(default)s")
    add("--tokens", type=int, default=128, help="of a text, about; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
