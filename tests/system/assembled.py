"""The body that a stream's chunks amount to, as a client that keeps everything puts it together."""

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]

SAID_ONCE = ("index", "role", "finish_reason", "stop_reason")
OF_THE_PROMPT = ("prompt_token_ids", "prompt_logprobs")


def assembled(chunks: Iterable[Json]) -> Json:
    """A body with all that was said, in the form of one that is not streamed."""
    body: Json = {"usage": None, **dict.fromkeys(OF_THE_PROMPT)}
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk.pop("choices"):
            if "delta" in choice:
                choice["message"] = choice.pop("delta")
            known = choices.setdefault(choice["index"], {})
            assert known.get("finish_reason") is None, "something came after the end"
            _add(known, choice)
        body |= {name: value for name, value in chunk.items() if value is not None}
    return body | {"choices": [choices[index] for index in sorted(choices)]}


def _add(known: Json, new: Json) -> None:
    """Join what came with what is there: texts and lists grow, anything else is said once."""
    for name, value in new.items():
        if name == "tool_calls":
            _add_calls(known.setdefault(name, []), value)
        elif isinstance(value, dict):
            known[name] = known.get(name) or {}
            _add(known[name], value)
        elif known.get(name) is None:
            known[name] = value
        elif name in SAID_ONCE:
            assert value in (None, known[name]), name
        elif value is not None:
            known[name] += value


def _add_calls(known: list[Json], new: list[Json]) -> None:
    for call in new:
        function = call.pop("function")
        if call.pop("index") == len(known):
            known.append({**call, "function": function})
        else:
            assert not call, "a call's id and type come once"
            known[-1]["function"]["arguments"] += function["arguments"]


def comparable(body: Json) -> Json:
    """A body without what may differ between equal answers: when, what was cached, and how nothing
    is written.
    """
    for name in ("created", "object"):
        del body[name]
    del body["usage"]["prompt_tokens_details"]
    for choice in body["choices"]:
        for part in (choice, choice.get("message", {}), choice.get("logprobs") or {}):
            for name in [name for name, value in part.items() if value in (None, "", [])]:
                del part[name]
    return {name: value for name, value in body.items() if value is not None}
