"""Whatever a client sends: no process dies, nothing answers 500, and the next client is served.

The long run is `python -m pytest tests/fuzz/test_http.py --hypothesis-profile=long --timeout=0 -s`.
"""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.budget import FUZZ
from tests.fuzz.http_answers import Exchange
from tests.fuzz.http_bytes import conversations

_TOGETHER = 4
"""Connections that are open at once, at most."""


def test_no_request_hurts(cell):
    server = cell.servers[0]
    statuses, sent = Counter(), Counter()

    @settings(FUZZ, max_examples=FUZZ.max_examples * 14)
    @given(st.lists(conversations(), min_size=1, max_size=_TOGETHER))
    def talk(together):
        exchanges = [Exchange.begin(each, (server.host, server.port)) for each in together]
        for exchange in exchanges:
            exchange.finish()
        for exchange in exchanges:
            statuses.update(exchange.judge())
        sent["requests"] += sum(each.count for each in together)

    with cell.unhurt():
        talk()
        print(dict(sent), dict(statuses))
