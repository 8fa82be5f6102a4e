"""`pagefleet chat` against a scripted HTTP server that cuts answers off."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pagefleet_launcher import conversation
from pagefleet_launcher.cli import main
from pagefleet_launcher.conversation import Chat, ChatError

DONE = b"data: [DONE]\n\n"


def event(text, id=""):
    payload = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
    return (f"id: {id}\n" * bool(id) + f"data: {payload}\n\n").encode()


def error(type, text):
    payload = json.dumps({"error": {"message": text, "type": type, "param": None, "code": None}})
    return payload.encode()


class Gateway:
    """Answers each request with the next of `script`: bytes of a stream, or a status and a body."""

    def __init__(self):
        self.script, self.asked = [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, b'{"data": [{"id": "small"}]}')

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                gateway.asked.append((self.headers["Last-Event-ID"], body))
                answer = gateway.script.pop(0)
                self.answer(*answer if isinstance(answer, tuple) else (200, answer))

            def answer(self, status, content):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def gateway(monkeypatch):
    monkeypatch.setattr(conversation, "PAUSE", 0.01)
    with Gateway() as gateway:
        yield gateway


@pytest.fixture
def chat(gateway):
    return Chat(gateway.url, "small", {"temperature": 0.0})


def test_an_answer_and_what_is_remembered_of_it(gateway, chat):
    gateway.script = [event("Hel") + b": wait\n\n" + event("lo") + DONE, event("Yes") + DONE]
    assert list(chat.ask("Hi")) == ["Hel", "lo"]
    assert list(chat.ask("Sure?")) == ["Yes"]
    _, body = gateway.asked[1]
    assert (body["model"], body["stream"], body["temperature"]) == ("small", True, 0.0)
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Sure?"),
    ]


def test_a_stream_that_breaks_goes_on_behind_its_last_whole_event(gateway, chat):
    """However often: also where an event was cut in the middle, or an error said that it passes."""
    gateway.script = [
        event("a", "t.1") + event("b", "t.2"),
        event("c", "t.3") + event("lost", "t.4")[:-2],
        b"data: " + error("service_unavailable_error", "leaving") + b"\n\n",
        (503, error("service_unavailable_error", "draining")),
        event("d", "t.5") + DONE,
    ]
    assert "".join(chat.ask("Go")) == "abcd"
    assert [last_id for last_id, _ in gateway.asked] == [None, "t.2", "t.3", "t.3", "t.3"]
    assert len({json.dumps(body) for _, body in gateway.asked}) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        (400, error("invalid_request_error", "too long")),
        b"data: " + error("server_error", "too long") + b"\n\n",
    ],
)
def test_a_refusal_is_told_and_forgotten(gateway, chat, refusal):
    gateway.script = [refusal]
    with pytest.raises(ChatError, match="too long"):
        list(chat.ask("Hi"))
    assert chat.messages == []
    assert len(gateway.asked) == 1


def test_what_stays_broken_ends(gateway, chat, monkeypatch):
    monkeypatch.setattr(conversation, "TRIES", 3)
    gateway.script = [b""] * 4
    with pytest.raises(ChatError, match="broke off: the connection was closed"):
        list(chat.ask("Hi"))


def test_questions_may_come_through_a_pipe(gateway):
    gateway.script = [event("One") + DONE, event("Two") + DONE]
    program = "import sys; from pagefleet_launcher.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "chat", "--url", gateway.url, "--system", "Be brief."]
    done = subprocess.run(
        [*command, "--max-tokens=5"],
        input="first\n\nsecond\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert done.stdout == "One\nTwo\n"
    _, body = gateway.asked[1]
    assert body["max_tokens"] == 5
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert len(body["messages"]) == 4


def test_nobody_there_is_a_sentence(capsys):
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1 does not answer: nothing listens there" in capsys.readouterr().err
