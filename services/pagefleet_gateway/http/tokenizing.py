"""What the tokenizer does, for clients that count or cut.

`POST /tokenize` and `POST /detokenize` are vLLM's, `POST /v1/responses/input_tokens` is OpenAI's,
`POST /v1/messages/count_tokens` Anthropic's. All take time: not for the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from pagefleet_gateway.bodies.parsing import parse
from pagefleet_gateway.bodies.schema import (
    ChatBody,
    ChatMessage,
    Documents,
    Effort,
    ThinkingOptions,
    TokenId,
)
from pagefleet_gateway.bodies.tools import Tools, shown_tools
from pagefleet_gateway.errors import bad_request
from pagefleet_gateway.http.facts import as_json
from pagefleet_gateway.http.gateway import Gateway
from pagefleet_gateway.http.guard import PostRoute, ignored_header
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.messages_object import MessageTokens
from pagefleet_gateway.requests.messages_input import message_prompt
from pagefleet_gateway.requests.prompts import chat_prompt, check_vocabulary, encode
from pagefleet_gateway.requests.response_input import response_prompt


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: either a prompt, or a conversation and what shapes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: bool | ThinkingOptions | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None
    """As the vocabulary spells them."""


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class Detokenized(msgspec.Struct):
    """The answer of `/detokenize`."""

    prompt: str


class InputTokens(msgspec.Struct):
    """The answer of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


Work: TypeAlias = Callable[[bytes, ServedModel, int], tuple[msgspec.Struct, list[str]]]
"""What is made of a body, for a model and the length of its context: the answer, and the names of
fields that are ignored. Raises ApiError: 400 that names the field, or 404 for another model.
"""


class TokenizerRoute(PostRoute):
    """The endpoint of one of the routes."""

    def __init__(self, gateway: Gateway, work: Work) -> None:
        super().__init__(gateway)
        self._work = work

    async def answer(self, content: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body is there; see `PostRoute`."""
        gateway = self._gateway
        loop = asyncio.get_running_loop()
        arguments = content, gateway.model, gateway.max_model_len
        done, ignored = await loop.run_in_executor(
            gateway.threads_for(content), self._work, *arguments
        )
        response = as_json(done)
        response.raw_headers += ignored_header(ignored)
        await response(scope, receive, send)


def tokenize(content: bytes, model: ServedModel, max_model_len: int) -> tuple[Tokenized, list[str]]:
    """The ids of a prompt or a conversation; see `Work`."""
    parsed = parse(content, TokenizeBody)
    body = parsed.body
    model.named(body.model)  # or 404
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("The body must have either prompt or messages.", "prompt")
    tokens = _text_tokens(body, model) if body.messages is None else _chat_tokens(body, model)
    strings = None
    if body.return_token_strs:
        strings = [model.tokenizer.backend.id_to_token(token) for token in tokens]
    return Tokenized(len(tokens), max_model_len, tokens, strings), parsed.ignored


def detokenize(
    content: bytes, model: ServedModel, max_model_len: int
) -> tuple[Detokenized, list[str]]:
    """The text of ids, special tokens included; see `Work`."""
    parsed = parse(content, DetokenizeBody)
    tokens = parsed.body.tokens
    model.named(parsed.body.model)  # or 404
    check_vocabulary(tokens, "tokens", model)
    return Detokenized(model.tokenizer.decode(tokens, skip_special_tokens=False)), parsed.ignored


def count_input(
    content: bytes, model: ServedModel, max_model_len: int
) -> tuple[InputTokens, list[str]]:
    """How many tokens a response's prompt would have; see `Work`."""
    prompt, ignored = response_prompt(content, model, max_model_len)
    return InputTokens(len(prompt)), ignored


def count_message(
    content: bytes, model: ServedModel, max_model_len: int
) -> tuple[MessageTokens, list[str]]:
    """How many tokens a message's prompt would have; see `Work`."""
    prompt, ignored = message_prompt(content, model, max_model_len)
    return MessageTokens(len(prompt)), ignored


_OF_CHATS: Final = (
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("reasoning_effort", "thinking", "enable_thinking", "documents"),
)


def _text_tokens(body: TokenizeBody, model: ServedModel) -> list[int]:
    for name in _OF_CHATS:
        if getattr(body, name):
            raise bad_request(f"{name} needs messages.", name)
    (tokens,) = encode([body.prompt or ""], "prompt", model, body.add_special_tokens is not False)
    return tokens


def _chat_tokens(body: TokenizeBody, model: ServedModel) -> list[int]:
    chat = ChatBody(
        messages=body.messages or [],
        add_special_tokens=body.add_special_tokens,
        **{name: getattr(body, name) for name in _OF_CHATS},
    )
    return chat_prompt(chat, model, shown_tools(body.tools) if body.tools else None)
