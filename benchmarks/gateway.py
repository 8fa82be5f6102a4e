"""What a streamed token costs the gateway, beside what uvicorn alone costs.

    python -m benchmarks.gateway --streams 1,32,256

A cell with an EchoEngine streams completions whose every token is one event, one token a step, as a
model would give them; the CPU time of the gateway's process (user and system, from /proc) is
divided by the tokens. Beside it stands the same division for a uvicorn with nothing but an
application that sends as many events of the same size: one after the other (`bare`), and at the
pace of the tokens (`paced`), which shows what it costs to wake up for each and to wake the reader.
The best of `--rounds` counts, because whatever else runs on the machine only adds.

Below, what it costs to render a chat's template in a helper process, where it can do no harm, and
what text costs without HTTP: microseconds a token to detokenize, watch for stop strings and
write events, for a short and a long answer; it must not grow.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn
from starlette.types import Receive, Scope, Send

from pagefleet.wire import Output, pack_ints
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.stream import Renderer
from pagefleet_gateway.requests.generation import Limits
from pagefleet_gateway.requests.understanding import understand_completion
from pagefleet_gateway.sandbox.isolated_template import IsolatedTemplate
from pagefleet_gateway.sandbox.template import ChatTemplate, TemplateSource

LETTERS = list(range(ord("a"), ord("z") + 1))
"""Token ids of the echo model whose text is complete at once."""

_LONGEST = 2000
_SECONDS_A_STREAM = 0.0003
"""Of a step: slow enough that no gateway falls behind, and joins tokens into one event."""

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)

_TICKS = os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _parser().parse_args(argv)
    if options.bare is not None:
        _serve_bare(options.bare, options.pace)
        return
    print("CPU microseconds a streamed token\n\n  streams   gateway   paced    bare")
    for streams in options.streams:
        tokens = min(max(options.tokens // streams, 100), _LONGEST)
        gateway = min(_gateway(streams, tokens) for _ in range(options.rounds))
        paced = min(_bare(streams, tokens, _pace(streams)) for _ in range(options.rounds))
        bare = min(_bare(streams, tokens, 0.0) for _ in range(options.rounds))
        print(f"  {streams:7}   {gateway:7.1f}   {paced:5.1f}   {bare:5.1f}")
    here, helper = _rendering()
    print(f"\nMicroseconds to render a chat: {here:.0f} here, {helper:.0f} in a helper")
    print(
        "\nMicroseconds of text a token, by tokens of the answer\n\n  stop strings      64   32,000"
    )
    for stop in ([], ["never", "ever"]):
        short, long = (_text(count, stop) for count in (64, 32_000))
        print(f"  {len(stop):12}   {short:5.1f}   {long:6.1f}   ratio {long / short:.2f}")


# --- processes ------------------------------------------------------------------------------------


def _gateway(streams: int, tokens: int) -> float:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        model = f"--model={_echo_model()}"
        gateways, workers = (f"ipc://{folder}/{name}.sock" for name in ("g", "w"))
        at_gateways = f"--gateway-endpoint={gateways}"
        at_workers = f"--worker-endpoint={workers}"
        stack.enter_context(_process("pagefleet_scheduler", at_gateways, at_workers))
        echo = ("--engine=echo", f"--step-seconds={_pace(streams)}", "--num-blocks=65536")
        stack.enter_context(_process("pagefleet_worker", model, at_workers, *echo))
        with _listening() as listener:
            fd = listener.fileno()
            gateway = _process("pagefleet_gateway", model, at_gateways, f"--fd={fd}", fd=fd)
            process = stack.enter_context(gateway)
            address = listener.getsockname()
        _wait_until_ready(address)
        return _cost(process, address, streams, tokens)


def _pace(streams: int) -> float:
    """Seconds between two tokens."""
    return max(0.005, streams * _SECONDS_A_STREAM)


def _bare(streams: int, tokens: int, pace: float) -> float:
    with ExitStack() as stack:
        with _listening() as listener:
            fd = listener.fileno()
            process = stack.enter_context(
                _process("benchmarks.gateway", f"--bare={fd}", f"--pace={pace}", fd=fd)
            )
            address = listener.getsockname()
        _wait_until_ready(address)
        return _cost(process, address, streams, tokens)


def _cost(
    process: "subprocess.Popen[bytes]", address: tuple[str, int], streams: int, tokens: int
) -> float:
    """CPU microseconds a token, while so many streams of so many tokens are answered."""
    asyncio.run(_read_streams(address, streams, 20))
    before = _cpu_seconds(process.pid)
    seen = asyncio.run(_read_streams(address, streams, tokens))
    spent = _cpu_seconds(process.pid) - before
    if seen < 0.9 * streams * tokens:
        sys.exit(f"{streams * tokens} tokens came as {seen} events: the server cannot keep up.")
    return 1e6 * spent / (streams * tokens)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def _process(
    module: str, *arguments: str, fd: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    inherited = () if fd is None else (fd,)
    process = subprocess.Popen(
        command, pass_fds=inherited, env=environment, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def _echo_model() -> str:
    command = [sys.executable, "-m", "pagefleet_worker.prepare", "echo"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()[-1]


def _wait_until_ready(address: tuple[str, int]) -> None:
    for _ in range(200):
        with socket.create_connection(address) as client:
            client.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            if b" 200 " in client.recv(100):
                return
        time.sleep(0.1)
    sys.exit("The server did not become ready.")


# --- clients --------------------------------------------------------------------------------------


class _Reader(asyncio.Protocol):
    """Asks for one stream, and counts its events until the server is done."""

    def __init__(self, tokens: int) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._tokens = tokens
        self._seen = 0
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = json.dumps(
            {
                "prompt": "Once upon a time",
                "max_tokens": self._tokens,
                "allowed_token_ids": LETTERS,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"X-Tokens: {self._tokens}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._seen += data.count(b"data: {")

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(self._seen)


async def _read_streams(address: tuple[str, int], streams: int, tokens: int) -> int:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: _Reader(tokens), *address) for _ in range(streams)]
    return sum([await reader.done for _, reader in made])


# --- uvicorn alone --------------------------------------------------------------------------------


def _serve_bare(fd: int, pace: float) -> None:
    config = uvicorn.Config(
        partial(_send_events, pace),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        interface="asgi3",
        access_log=False,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


async def _send_events(pace: float, scope: Scope, receive: Receive, send: Send) -> None:
    """As many events as the request says, one every `pace` seconds."""
    tokens = int(dict(scope["headers"]).get(b"x-tokens", b"0"))
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    event = b"data: {" + b"x" * 180 + b"}\n\n"
    for _ in range(tokens):
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(pace)
    await send({"type": "http.response.body", "body": b""})


# --- templates ------------------------------------------------------------------------------------


def _rendering() -> tuple[float, float]:
    """Microseconds, in the median, in this process and in a helper."""
    source = TemplateSource(_TEMPLATE, {})
    chat = {"messages": [{"role": "user", "content": "hello " * 20}] * 4}
    medians = []
    for template in (ChatTemplate(source.text, {}), IsolatedTemplate(source)):
        seconds = []
        for _ in range(2000):
            began = time.perf_counter()
            template.render(chat)
            seconds.append(time.perf_counter() - began)
        medians.append(1e6 * statistics.median(seconds))
    here, helper = medians
    return here, helper


# --- text -----------------------------------------------------------------------------------------


def _text(count: int, stop: list[str]) -> float:
    """Microseconds a token, over as many answers as make 64,000 tokens; the best of three."""
    model = ServedModel.load(Path(_echo_model()))
    body = {"prompt": "x", "max_tokens": count, "stream": True, "stop": stop}
    content, limits = json.dumps(body).encode(), Limits(max_model_len=10**6)
    best = float("inf")
    for _ in range(3):
        seconds = 0.0
        for _ in range(64_000 // count):
            answer = Answer(understand_completion(content, model, limits), model)
            renderer = Renderer(answer, model)
            request = answer.prompts[0].request
            news = [
                Output(request, 1, 0, position, pack_ints([LETTERS[position % 26]]))
                for position in range(count)
            ]
            began = time.perf_counter()
            for item in news:
                renderer.events(answer.take([item]))
            seconds += time.perf_counter() - began
        best = min(best, 1e6 * seconds / 64_000)
    return best


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--streams",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[1, 32, 256],
        metavar="N,...",
        help="streams at once; default: 1,32,256",
    )
    parser.add_argument(
        "--tokens", type=int, default=50_000, help="of all streams; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=float, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
