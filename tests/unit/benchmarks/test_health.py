"""The prober of /health must see a lie, and see when it began."""

import http.server
import threading

import pytest

from benchmarks.health import Prober


class Liar(http.server.BaseHTTPRequestHandler):
    """Answers with the statuses of its server, one after another, and then with the last."""

    def do_GET(self):
        statuses = self.server.statuses
        self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def ask():
    """What a prober got from a server with these statuses."""

    def probed(*statuses):
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
            server.statuses = list(statuses)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            prober = Prober(f"http://127.0.0.1:{server.server_port}/health")
            while len(prober.answers) < len(statuses):
                threading.Event().wait(0.01)
            prober.stop()
            server.shutdown()
            thread.join()
        return prober

    return probed


def test_every_answer_but_200_is_counted(ask):
    prober = ask(200, 503, 200, 503)
    moments = [asked for asked, _, _ in prober.answers]
    assert [status for _, status, _ in prober.answers][:4] == [200, 503, 200, 503]
    assert prober.said_falsely(moments[0]) == 0
    assert prober.said_falsely(moments[3]) == 1
    assert prober.row(moments[3]).startswith("| 3 | 1 | ")


def test_no_answer_is_not_200():
    prober = Prober("http://127.0.0.1:1/health")
    while not prober.answers:
        threading.Event().wait(0.01)
    prober.stop()
    assert prober.answers[0][1] == 0
