"""What the tokenizer does, for clients that count or cut.

`POST /tokenize` and `POST /detokenize` are vLLM's, `POST /v1/responses/input_tokens` is OpenAI's.
All take time: not for the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from pagefleet_gateway.bodies.parsing import parse
from pagefleet_gateway.bodies.schema import ChatBody, ChatMessage, TokenId
from pagefleet_gateway.bodies.tools import Tools, shown_tools
from pagefleet_gateway.errors import bad_request
from pagefleet_gateway.http.facts import as_json
from pagefleet_gateway.http.gateway import Gateway
from pagefleet_gateway.http.guard import PostRoute
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.messages_object import MessageTokens
from pagefleet_gateway.requests.generation import Limits
from pagefleet_gateway.requests.messages_input import message_prompt
from pagefleet_gateway.requests.prompts import chat_prompt, check_vocabulary, encode
from pagefleet_gateway.requests.response_input import understand_response


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: either a prompt, or a conversation and what shapes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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


class TokenizerRoute(PostRoute):
    """The endpoint of one of the routes; `work` is what it does with a body."""

    def __init__(
        self,
        gateway: Gateway,
        work: Callable[
            [bytes, ServedModel, int], Tokenized | Detokenized | InputTokens | MessageTokens
        ],
    ) -> None:
        super().__init__(gateway)
        self._work = work

    async def answer(self, content: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body is there; see `PostRoute`."""
        gateway = self._gateway
        loop = asyncio.get_running_loop()
        arguments = content, gateway.model, gateway.max_model_len
        done = await loop.run_in_executor(gateway.threads_for(content), self._work, *arguments)
        await as_json(done)(scope, receive, send)


def tokenize(content: bytes, model: ServedModel, max_model_len: int) -> Tokenized:
    """The ids of a prompt or a conversation.

    Raises:
        ApiError: 400 that names the field, or 404 for another model.
    """
    body = parse(content, TokenizeBody).body
    model.named(body.model)  # or 404
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("The body must have either prompt or messages.", "prompt")
    tokens = _text_tokens(body, model) if body.messages is None else _chat_tokens(body, model)
    strings = None
    if body.return_token_strs:
        strings = [model.tokenizer.backend.id_to_token(token) for token in tokens]
    return Tokenized(len(tokens), max_model_len, tokens, strings)


def detokenize(content: bytes, model: ServedModel, max_model_len: int) -> Detokenized:
    """The text of ids, special tokens included.

    Raises:
        ApiError: 400 that names the field, or 404 for another model.
    """
    body = parse(content, DetokenizeBody).body
    model.named(body.model)  # or 404
    check_vocabulary(body.tokens, "tokens", model)
    return Detokenized(model.tokenizer.decode(body.tokens, skip_special_tokens=False))


def count_input(content: bytes, model: ServedModel, max_model_len: int) -> InputTokens:
    """How many tokens a response's prompt would have.

    Raises:
        ApiError: what the response would be refused with.
    """
    generation = understand_response(content, model, Limits(max_model_len))
    return InputTokens(sum(map(len, generation.prompts)))


def count_message(content: bytes, model: ServedModel, max_model_len: int) -> MessageTokens:
    """How many tokens a message's prompt would have.

    Raises:
        ApiError: 400 that names the field, or 404 for another model.
    """
    return MessageTokens(len(message_prompt(content, model, max_model_len)))


_OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def _text_tokens(body: TokenizeBody, model: ServedModel) -> list[int]:
    for name in _OF_CHATS:
        if getattr(body, name):
            raise bad_request(f"{name} needs messages.", name)
    (tokens,) = encode([body.prompt or ""], "prompt", model, body.add_special_tokens is not False)
    return tokens


def _chat_tokens(body: TokenizeBody, model: ServedModel) -> list[int]:
    shown = shown_tools(body.tools) if body.tools else None
    return chat_prompt(
        ChatBody(
            messages=body.messages or [],
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        ),
        model,
        shown,
    )
