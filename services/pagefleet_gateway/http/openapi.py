"""`GET /openapi.json`: the interface as an OpenAPI 3.2 document; 3.1 had no words for streams.

Bodies and answers are described by the very types that validate and write them, so the document
cannot say anything else than what is done.
"""

from dataclasses import dataclass
from functools import cache
from http import HTTPMethod
from typing import Any, Final

import msgspec

from pagefleet_gateway.bodies.embedding_body import EmbeddingBody
from pagefleet_gateway.bodies.messages_body import CountBody, MessagesBody
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import ChatBody, CompletionBody
from pagefleet_gateway.error_form import MESSAGES_PATH, MessagesErrorBody
from pagefleet_gateway.errors import ErrorBody
from pagefleet_gateway.http.edge import OPEN_PATHS
from pagefleet_gateway.http.facts import (
    Health,
    Live,
    Model,
    ModelList,
    Version,
    pagefleet_version,
)
from pagefleet_gateway.http.memory import Memory
from pagefleet_gateway.http.tokenizing import (
    DetokenizeBody,
    Detokenized,
    InputTokens,
    TokenizeBody,
    Tokenized,
)
from pagefleet_gateway.rendering.completion_object import (
    ChatChunk,
    ChatCompletion,
    Completion,
)
from pagefleet_gateway.rendering.embeddings import EmbeddingList
from pagefleet_gateway.rendering.messages_object import Message, MessageEvent, MessageTokens
from pagefleet_gateway.rendering.response_events import ResponseEvent
from pagefleet_gateway.rendering.response_object import ResponseObject
from pagefleet_gateway.telemetry.dashboard import Status

_REF: Final = "#/components/schemas/{name}"
_JSON, _EVENTS, _HTML, _TEXT = "application/json", "text/event-stream", "text/html", "text/plain"


@dataclass(frozen=True)
class Operation:
    """One method of one route, for the document. `answers` maps media types to what they hold."""

    path: str
    summary: str
    answers: dict[str, Any]
    body: type[msgspec.Struct] | None = None
    parameters: tuple[str, ...] = ()
    """Names in the path."""
    has_end: bool = True
    """Streams end with `[DONE]`, and may break off with an error in its common form before."""
    error: type[msgspec.Struct] = ErrorBody
    """The form of errors."""

    @property
    def method(self) -> HTTPMethod:
        """POST where there is a body."""
        return HTTPMethod.GET if self.body is None else HTTPMethod.POST


OPERATIONS: Final = (
    Operation(
        "/v1/completions",
        "Go on with a text.",
        {_JSON: Completion, _EVENTS: Completion},
        CompletionBody,
    ),
    Operation(
        "/v1/chat/completions",
        "Answer a conversation.",
        {_JSON: ChatCompletion, _EVENTS: ChatChunk},
        ChatBody,
    ),
    Operation(
        "/v1/responses",
        "Answer a conversation of items.",
        {_JSON: ResponseObject, _EVENTS: ResponseEvent},
        ResponseBody,
        has_end=False,
    ),
    Operation(
        "/v1/responses/input_tokens",
        "How many tokens the prompt of a response would have.",
        {_JSON: InputTokens},
        ResponseBody,
    ),
    Operation(
        MESSAGES_PATH,
        "Answer a conversation of blocks.",
        {_JSON: Message, _EVENTS: MessageEvent},
        MessagesBody,
        has_end=False,
        error=MessagesErrorBody,
    ),
    Operation(
        f"{MESSAGES_PATH}/count_tokens",
        "How many tokens the prompt of a message would have.",
        {_JSON: MessageTokens},
        CountBody,
        error=MessagesErrorBody,
    ),
    Operation("/v1/embeddings", "The embeddings of texts.", {_JSON: EmbeddingList}, EmbeddingBody),
    Operation("/v1/models", "The model that is served, and its LoRA adapters.", {_JSON: ModelList}),
    Operation("/v1/models/{name}", "One of them.", {_JSON: Model}, parameters=("name",)),
    Operation("/tokenize", "The token ids of a text or chat.", {_JSON: Tokenized}, TokenizeBody),
    Operation("/detokenize", "The text of token ids.", {_JSON: Detokenized}, DetokenizeBody),
    Operation("/", "The dashboard.", {_HTML: str}),
    Operation("/status", "What the dashboard shows.", {_JSON: Status}),
    Operation("/memory", "How memory is used, and who waits for it.", {_JSON: Memory}),
    Operation("/live", "Whether the process runs.", {_JSON: Live}),
    Operation("/ready", "Whether a request that comes now would be served.", {_JSON: Health}),
    Operation("/health", "Whether the cell works.", {_JSON: Health}),
    Operation("/metrics", "For Prometheus.", {_TEXT: str}),
    Operation("/version", "Of Pagefleet.", {_JSON: Version}),
    Operation("/openapi.json", "This document.", {_JSON: dict[str, Any]}),
)


@cache
def document() -> bytes:
    """The document as JSON."""
    types: list[Any] = []
    for operation in OPERATIONS:
        types += [operation.error]
        types += [*operation.answers.values(), *([operation.body] if operation.body else [])]
    unique = list(dict.fromkeys(types))
    described, components = msgspec.json.schema_components(unique, ref_template=_REF)
    schemas = dict(zip(unique, described, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        methods = paths.setdefault(operation.path, {})
        methods[operation.method.lower()] = _described(operation, schemas)
    return msgspec.json.encode(
        {
            "openapi": "3.2.0",
            "info": {"title": "Pagefleet", "version": pagefleet_version()},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer"},
                    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
                },
            },
            "security": [{"key": []}, {"header": []}, {}],
        }
    )


def _described(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    answers = {
        media: _media_type(media, schemas[type], schemas[operation.error], operation.has_end)
        for media, type in operation.answers.items()
    }
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "As asked.", "content": answers},
            "default": {
                "description": "Anything else.",
                "content": {_JSON: {"schema": schemas[operation.error]}},
            },
        },
    }
    if operation.body is not None:
        content = {_JSON: {"schema": schemas[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in operation.parameters
        ]
    if operation.path in OPEN_PATHS:
        described["security"] = []
    return described


def _media_type(
    media: str, schema: dict[str, Any], error: dict[str, Any], has_end: bool
) -> dict[str, Any]:
    """What an answer holds. That of a stream is told by its events (OpenAPI 3.2, Media Type
    Object): JSON of the schema, and in streams of chunks an error, or the end that OpenAI's clients
    wait for.
    """
    if media != _EVENTS:
        return {"schema": schema}
    data: dict[str, Any]
    if not has_end:
        data = {"type": "string", "contentMediaType": _JSON, "contentSchema": schema}
        return {
            "itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}
        }
    chunk = {"contentMediaType": _JSON, "contentSchema": {"anyOf": [schema, error]}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, chunk]}
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
