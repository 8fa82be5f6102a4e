"""Streams of completions as clients read them who may lose them and go on."""

import json
from collections import defaultdict
from contextlib import suppress

import httpx


def read(server, question, last_id=None, watch=lambda tokens, last_id: None):
    """Tokens of each choice until the stream ends or breaks, its last id, and how it ended.

    `watch` is told how many tokens there are and the last id, and that it is enough if it says so.
    """
    tokens, ended = defaultdict(list), None
    url = f"http://{server.host}:{server.port}/v1/completions"
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with (
        suppress(httpx.RemoteProtocolError, httpx.ReadError),
        httpx.stream("POST", url, content=question.body, headers=headers, timeout=60) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            name, _, content = line.partition(": ")
            if name == "id":
                last_id = content
            elif name == "data" and content == "[DONE]":
                ended = ended or content
            elif name == "data":
                chunk = json.loads(content)
                if "error" in chunk:
                    ended = chunk["error"]["code"]
                for choice in chunk.get("choices", ()):
                    tokens[choice["index"]] += choice["token_ids"]
                    if watch(sum(map(len, tokens.values())), last_id):
                        return tokens, last_id, ended
    return tokens, last_id, ended
