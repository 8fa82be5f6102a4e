import json
from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loadgen.answer import AnswerError, EventStream
from benchmarks.loadgen.recording import Server

PAYLOADS = [json.dumps({"choices": [{"text": text}]}).encode() for text in (" a", "\n\n", "é")]
BODY = b": keep-alive\n\n" + b"".join(
    b"id: %d\r\ndata: %s\r\n\r\n" % (number, each) for number, each in enumerate(PAYLOADS, 1)
)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer() -> EventStream:
    connection = h11.Connection(h11.CLIENT)
    Server.at("http://127.0.0.1:8000").message(connection, b"{}")
    return EventStream(connection)


@given(
    chunk=st.integers(1, len(BODY)),
    cuts=st.lists(st.integers(0, 2 * len(BODY)), max_size=20),
)
def test_payloads_do_not_depend_on_how_the_bytes_arrive(chunk, cuts):
    chunks = [BODY[start : start + chunk] for start in range(0, len(BODY), chunk)]
    response = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in chunks)
    response += b"0\r\n\r\n"
    bounds = [0, *sorted(cut for cut in cuts if cut < len(response)), len(response)]
    events = answer()
    received = []
    for start, end in pairwise(bounds):
        # Nothing received would mean that the server closed the connection.
        if start < end:
            received += events.feed(response[start:end])
        assert events.last_id == (str(len(received)) if received else "")
    assert received == PAYLOADS


def test_a_response_may_end_with_the_connection():
    events = answer()
    assert events.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY) == PAYLOADS
    assert events.feed(b"") == []


def test_a_connection_that_closes_before_it_answers_is_cut_off():
    with pytest.raises(AnswerError) as raised:
        answer().feed(b"")
    assert raised.value.kind == "cut off"


def test_the_path_of_the_url_comes_before_the_route():
    server = Server.at("http://somewhere/deployments/one/")
    assert (server.host, server.port) == ("somewhere", 80)
    head = server.message(h11.Connection(h11.CLIENT), b"{}")
    assert head.startswith(b"POST /deployments/one/v1/completions HTTP/1.1\r\n")
