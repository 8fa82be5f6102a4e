"""What one body may ask for in all.

Each field has its own range, but a list of prompts multiplies what goes with each of them, and
choices multiply what each shows of its prompt: two megabytes may ask for gigabytes, at everybody's
expense. What passes here costs a gateway and the scheduler some tens of milliseconds at most
between two turns of other requests.
"""

import math
from collections.abc import Sequence
from typing import Final

from pagefleet.params import SamplingParams
from pagefleet.wire import size_of
from pagefleet_gateway.bodies.schema import GenerationBody
from pagefleet_gateway.errors import bad_request

MAX_ANSWERS: Final = 2048
"""Choices of all prompts of a body."""

MAX_SHOWN_TOKENS: Final = 1 << 20
"""Ids of prompts that one answer shows."""

MAX_ECHOED_CHARACTERS: Final = 1 << 22
"""Of prompts, that one answer begins its choices with."""

MAX_PROMPT_LOGPROBS: Final = 1 << 20
"""Logprobs of prompts that one answer shows; a gateway needs a third of a KB for each."""

MAX_KEPT: Final = 1 << 22
"""Tokens and logprobs that an answer in one body may have: a gateway keeps them to its end, and
needs up to 0.4 KB for each when it writes them."""

MAX_AHEAD: Final = 1 << 15
"""Tokens of all choices of a stream that are generated ahead of a client that does not read, unless
16 of each are more; with 20 logprobs a gateway needs 0.65 KB for each."""

STREAM_WINDOW: Final = 256
"""Such tokens of one choice."""

MAX_REPEATED_BYTES: Final = 32 * 2**20
"""Of parameters and a prediction, which the scheduler is told with each prompt of a body."""


def check_bounds(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    choices: int,
    prediction: bytes,
) -> None:
    """Let a body pass that asks for no more than what one may.

    choices: of each prompt. prediction: its tokens as the scheduler is told them.

    Raises:
        ApiError: 400 that names the field.
    """
    _check_answers(body, len(prompts), choices)
    tokens = sum(map(len, prompts)) * choices
    _check_shown(body, tokens)
    _check_prompt_logprobs(body, params, tokens)
    _check_kept(body, params, len(prompts) * choices)
    _check_repeated(len(prompts), size_of(params) + len(prediction))


def check_echo(echo: Sequence[str], choices: int) -> None:
    """Let texts of prompts pass that each of so many choices begins with.

    Raises:
        ApiError: 400 that names `echo`.
    """
    characters = sum(map(len, echo)) * choices
    if characters > MAX_ECHOED_CHARACTERS:
        raise bad_request(
            f"echo asks for {characters} characters of prompts, with which each choice begins, but "
            f"{MAX_ECHOED_CHARACTERS} are the most.",
            "echo",
        )


def most_tokens(body: GenerationBody, answers: int, logprobs: int | None) -> float:
    """Of each of so many choices that all come in one body, or beams at once in a stream, with so
    many logprobs.
    """
    if body.stream and not getattr(body, "use_beam_search", None):
        return math.inf
    return MAX_KEPT // (answers * (1 + (logprobs or 0)))


def window(body: GenerationBody, params: SamplingParams, answers: int) -> int:
    """Tokens of each of so many choices that may be ahead of a client (`Submit.window`)."""
    if not body.stream or params.beam_width:
        return 0
    return min(STREAM_WINDOW, max(MAX_AHEAD // answers, 16))


def _check_answers(body: GenerationBody, prompts: int, choices: int) -> None:
    if prompts * choices > MAX_ANSWERS:
        raise bad_request(
            f"{prompts} prompts with {choices} choices each are more than the {MAX_ANSWERS} "
            "choices that one body may ask for; send several.",
            "best_of" if getattr(body, "best_of", None) else "n",
        )


def _check_shown(body: GenerationBody, tokens: int) -> None:
    if body.return_token_ids and tokens > MAX_SHOWN_TOKENS:
        raise bad_request(
            f"return_token_ids asks for {tokens} ids of prompts, which each choice shows, but "
            f"{MAX_SHOWN_TOKENS} are the most.",
            "return_token_ids",
        )


def _check_prompt_logprobs(body: GenerationBody, params: SamplingParams, tokens: int) -> None:
    if params.prompt_logprobs is None:
        return
    count = tokens * (1 + params.prompt_logprobs)
    if count > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise bad_request(
            f"{field} asks for {count} logprobs of prompts, which each choice shows, but "
            f"{MAX_PROMPT_LOGPROBS} are the most.",
            field,
        )


def _check_kept(body: GenerationBody, params: SamplingParams, answers: int) -> None:
    most = most_tokens(body, answers, params.logprobs)
    if params.max_tokens > most:
        mend = "ask less" if body.stream else "set stream, or ask less"
        raise bad_request(
            f"{answers} choices of {params.max_tokens} tokens, with their logprobs, are too much "
            f"for one body, which may have {int(most)} tokens of each; {mend}.",
            "max_tokens" if params.logprobs is None else "logprobs",
        )


def _check_repeated(prompts: int, size: int) -> None:
    if prompts * size > MAX_REPEATED_BYTES:
        raise bad_request(
            f"Each of the {prompts} prompts takes along {size} bytes of what else is asked "
            f"for, as a grammar or a prediction, but {MAX_REPEATED_BYTES} together are the most.",
            "prompt",
        )
