"""Prompts of all forms as token ids. Tokenizing takes time: not for the event loop."""

import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

from msgspec import structs

from pagefleet_gateway.bodies.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    joined,
)
from pagefleet_gateway.bodies.tools import shown_calls
from pagefleet_gateway.errors import ApiError, bad_request
from pagefleet_gateway.model import (
    EFFORT_VARIABLE,
    THINKING_SWITCHES,
    THINKING_VARIABLES,
    ServedModel,
)
from pagefleet_gateway.requests.generation import Limits
from pagefleet_gateway.sandbox.template import ChatTemplateError
from pagefleet_gateway.text.tokenizer import PromptError, PromptTooLongError

MAX_PROMPTS: Final = 1024

MAX_PREDICTION: Final = 16_384
"""Tokens of a prediction that count: all of them are looked through at every step."""


def completion_prompts(
    body: CompletionBody, model: ServedModel, field: str = "prompt"
) -> list[list[int]]:
    """The ids of each prompt in the body.

    field: where the route has its prompts. Raises ApiError, 400 that names the field.
    """
    prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [entry for entry in prompt if isinstance(entry, str)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    if len(prompt) not in (len(texts), len(lists), len(ids)):
        raise bad_request(f"{field} mixes strings, token ids and lists of token ids.", field)
    if max(len(texts), len(lists)) > MAX_PROMPTS:
        raise bad_request(f"{field} holds more than {MAX_PROMPTS} prompts.", field)
    if texts:
        return encode(texts, field, model, body.add_special_tokens is not False)
    prompts = lists or [ids]
    for tokens in prompts:
        check_vocabulary(tokens, field, model)
    return prompts


def predicted(body: GenerationBody, model: ServedModel) -> list[int]:
    """The ids of what the body says that the answer may repeat.

    Raises:
        ApiError: 400 that names `prediction`.
    """
    if body.prediction is None:
        return []
    text = joined(body.prediction.content)
    return encode([text], "prediction", model, add_special_tokens=False)[0][:MAX_PREDICTION]


def check_vocabulary(tokens: Sequence[int], field: str, model: ServedModel) -> None:
    """Let ids pass that the model knows.

    Raises:
        ApiError: 400 that names `field`.
    """
    size, largest = model.manifest.vocab_size, max(tokens, default=0)
    if largest >= size:
        raise bad_request(f"{field} holds {largest}, outside the vocabulary of {size}.", field)


def echoed(body: CompletionBody, prompts: list[list[int]], model: ServedModel) -> list[str]:
    """The text of each prompt: as it was sent, or as its ids read."""
    if body.truncate_prompt_tokens is None:
        prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        texts = [entry for entry in prompt if isinstance(entry, str)]
        if texts:
            return texts
    skip = body.skip_special_tokens is not False
    return model.tokenizer.decode_all(prompts, skip_special_tokens=skip)


def continued(body: ChatBody) -> str:
    """The text that a chat's answer goes on with, if it does: the assistant's own last message."""
    last = body.messages[-1]
    return last.text if last.role == "assistant" else ""


def chat_prompt(
    body: ChatBody,
    model: ServedModel,
    tools: list[dict[str, Any]] | None = None,
    field: str = "messages",
    now: float | None = None,
) -> list[int]:
    """The ids of the conversation, rendered by the model's template, which is shown `tools`.

    field: where the route has its messages. now: the Unix time that the template may tell, if it is
    not the present. Raises ApiError, 400 that names the field.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request(
            "add_generation_prompt and continue_final_message exclude each other.",
            "continue_final_message",
        )
    if body.add_special_tokens:
        raise bad_request(
            "add_special_tokens is not for chats, whose template writes its own.",
            "add_special_tokens",
        )
    variables = body.chat_template_kwargs or {}
    refused = filter(model.template_reads, variables.keys() - THINKING_VARIABLES)
    if (name := min(refused, default=None)) is not None:
        allowed = ", ".join(sorted(THINKING_VARIABLES))
        text = f"chat_template_kwargs may set {allowed}, but not {name!r}."
        raise bad_request(text, "chat_template_kwargs")
    if body.documents and not model.template_reads("documents"):
        raise bad_request(
            "documents have no place in this model's chat template.", "documents", "unsupported"
        )
    conversation = {
        **_thinking_variables(body),
        **variables,
        "documents": body.documents or None,
        "messages": [
            _for_template(message, f"messages[{number}]", model)
            for number, message in enumerate(body.messages)
        ],
        "tools": tools,
        "add_generation_prompt": not body.continue_final_message
        and body.add_generation_prompt is not False,
        "strftime_now": time.time() if now is None else now,
    }
    try:
        return model.encode_chat(conversation, bool(body.continue_final_message))
    except (PromptError, ChatTemplateError) as error:
        raise _refused(error, field) from error
    except RecursionError:
        raise bad_request(f"{field}, or what goes with it, is nested too deeply.", field) from None


def newest_turns(
    body: ChatBody,
    model: ServedModel,
    tools: list[dict[str, Any]] | None,
    field: str,
    now: float,
    room: int,
) -> list[int]:
    """As `chat_prompt`, without the first turns: as few are left out as must be for `room` tokens.

    What stands before the first message of a user stays, and the next is one of a user. Where no
    turn could be left out or the last is too long for itself, the prompt is longer than `room`.
    """
    begins = [i for i, message in enumerate(body.messages) if message.role == "user"] or [0]
    opening = body.messages[: begins[0]]

    def prompt(begin: int) -> list[int]:
        shortened = structs.replace(body, messages=[*opening, *body.messages[begin:]])
        return chat_prompt(shortened, model, tools, field, now)

    def length(begin: int) -> int:
        try:
            return len(prompt(begin))
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return sys.maxsize

    fitting = bisect_left(begins, -room, key=lambda begin: -length(begin))
    return prompt(begins[min(fitting, len(begins) - 1)])


def _thinking_variables(body: ChatBody) -> dict[str, Any]:
    """What a template is told of thinking: by its switches whether at all, and how much."""
    if (thinks := body.thinks) is None:
        return {}
    switches = dict.fromkeys(THINKING_SWITCHES, thinks)
    effort = body.reasoning_effort if thinks else "none"
    return switches if effort is None else {**switches, EFFORT_VARIABLE: effort}


def _for_template(message: ChatMessage, field: str, model: ServedModel) -> dict[str, Any]:
    """A developer speaks as the system where the template knows no such role: it may say nothing
    of a message whose role it does not know.
    """
    says = message.content is not None or message.refusal is not None
    if not says and not (message.role == "assistant" and message.tool_calls):
        raise bad_request(f"{field}.content is missing.", "messages")
    renamed = message.role == "developer" and not model.template_reads("developer")
    role = "system" if renamed else message.role
    shown: dict[str, Any] = {"role": role, "content": message.text}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if thoughts := message.reasoning_content or message.reasoning:
        shown["reasoning_content"] = shown["reasoning"] = thoughts
        if not (message.text and message.tool_calls):  # gpt-oss' template refuses both then
            shown["thinking"] = thoughts
    if message.tool_calls:
        shown["tool_calls"] = shown_calls(message.tool_calls)
    return shown


def encode(
    texts: Sequence[str], field: str, model: ServedModel, add_special_tokens: bool
) -> list[list[int]]:
    """The ids of each text.

    Raises:
        ApiError: 400 that names `field`.
    """
    try:
        return model.tokenizer.encode(texts, add_special_tokens)
    except PromptError as error:
        raise _refused(error, field) from error


def truncated(
    body: GenerationBody, prompts: list[list[int]], limits: Limits, answer: int
) -> list[list[int]]:
    """Prompts cut as the body asks; where it says -1, so that there is room for `answer` tokens
    behind them, but never to none.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompts
    if keep == -1:
        keep = max(limits.room(answer), 1)
    if body.truncation_side == "right":
        return [tokens[:keep] for tokens in prompts]
    return [tokens[max(len(tokens) - keep, 0) :] for tokens in prompts]


def _refused(error: PromptError | ChatTemplateError, field: str) -> ApiError:
    too_long = isinstance(error, PromptTooLongError)
    return bad_request(str(error), field, "context_length_exceeded" if too_long else None)
