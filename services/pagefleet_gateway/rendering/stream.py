"""Answers as bytes: one JSON body, or the events of a stream (server-sent events, WHATWG HTML).

A stream is `data: {json}` for each chunk, a comment while nothing happens, and `data: [DONE]`. All
chunks that are due together are one string of bytes, so that they cost one send. The pieces of a
choice, joined, are exactly the choice of the whole body.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.answer import Answer, Prompt
from pagefleet_gateway.rendering.completion_object import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Delta,
    Usage,
)
from pagefleet_gateway.rendering.one_line import one_line
from pagefleet_gateway.resume import Had, event_id, position
from pagefleet_gateway.text.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptForm,
    TokenEntry,
    chat_form,
    completion_form,
    prompt_form,
)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()

_ANY_TEXT = "\0"
_ANY_TEXT_IN_JSON = _encoder.encode(_ANY_TEXT)


def event(content: bytes) -> bytes:
    """One event of a stream; the content is JSON."""
    return b"data: " + one_line(content) + b"\n\n"


class Renderer:
    """Writes one answer as JSON.

    ticket: what the ids of a stream's events begin with; without one they have no ids.
    """

    keep_alive: ClassVar[bytes] = KEEP_ALIVE
    """What a stream says while nothing happens."""

    def __init__(self, answer: Answer, model: ServedModel, ticket: str = "") -> None:
        self._answer = answer
        self._generation = answer.generation
        self._vocabulary = model.vocabulary
        self._names_by_id = bool(answer.generation.body.return_tokens_as_token_ids)
        self._ticket = ticket
        had = answer.generation.had
        behind = {index: had.get(index, Had(0)) for index in answer.choices}
        self._positions = {index: position(each) for index, each in behind.items()}
        self._started = {index for index, each in had.items() if each.count}
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    @property
    def _echoes_prompt(self) -> bool:
        return self._generation.kind == "completion" and self._generation.echo is not None

    @property
    def _continued(self) -> str:
        """In a chat with `echo`, the message that the answer goes on with."""
        return self._generation.echo[0] if self._generation.echo else ""

    # --- a stream -------------------------------------------------------------------------------

    def start(self) -> bytes:
        """Events before the first news: in a chat, who speaks, and what the answer goes on with.

        The last alone has an id: no position tells who has some of them from who has all.
        """
        if self._generation.kind == "completion" or self._generation.had:
            return b""
        deltas = [Delta("assistant", "")]
        if self._continued:
            deltas.append(Delta(content=self._continued))
        *others, last = (
            self._chat_event(ChatChunkChoice(index=index, delta=delta))
            for index in self._answer.choices
            for delta in deltas
        )
        return b"".join([*others, self._identified(last)])

    def events(self, pieces: Mapping[int, Piece]) -> bytes:
        """One event for each piece with anything in it, and the end if this was the last."""
        events = []
        for index, piece in pieces.items():
            choice = self._answer.choices[index]
            if piece.is_text and index in self._around_text:
                chunk = self._text_event(index, piece.text)
            elif self._is_worth_an_event(index, piece):
                chunk = self._chunk(index, piece)
            else:
                continue
            had = Had(choice.count, choice.digest, choice.finished, choice.numerics)
            self._positions[index] = position(had)
            events.append(self._identified(chunk))
        if self._answer.finished:
            events.append(self._end())
        return b"".join(events)

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails after its headers."""
        return event(error.body) + DONE

    def _is_worth_an_event(self, index: int, piece: Piece) -> bool:
        first = self._echoes_prompt and index not in self._started
        shows_tokens = bool(self._generation.body.return_token_ids and piece.tokens)
        said = piece.text or piece.reasoning or piece.calls
        return bool(said or piece.entries or piece.finish or first or shows_tokens)

    def _identified(self, event: bytes) -> bytes:
        """An event with its id, which says what the client has behind it."""
        if not self._ticket:
            return event
        return b"id: %s\n%s" % (event_id(self._ticket, self._positions.values()).encode(), event)

    def _chunk(self, index: int, piece: Piece) -> bytes:
        if self._generation.kind == "completion":
            chunk = self._completion_chunk(index, piece)
        else:
            chunk = self._chat_chunk(index, piece)
        if index not in self._started:
            self._started.add(index)
            self._learn(index)
        return chunk

    def _learn(self, index: int) -> None:
        """Keep what stands around the text in an event that says nothing but text."""
        body = self._generation.body
        if not (body.return_token_ids or self._generation.continuous_usage):
            before, _, after = self._chunk(index, Piece(_ANY_TEXT)).rpartition(_ANY_TEXT_IN_JSON)
            self._around_text[index] = before, after

    def _text_event(self, index: int, text: str) -> bytes:
        before, after = self._around_text[index]
        return before + one_line(_encoder.encode(text)) + after

    def _completion_chunk(self, index: int, piece: Piece) -> bytes:
        choice = self._completion_choice(index, index, piece, first=index not in self._started)
        return self._event(
            Completion(
                id=self._generation.id,
                created=self._generation.created,
                model=self._generation.model,
                choices=[choice],
                usage=self._usage_so_far(),
                system_fingerprint=self._fingerprint(choice),
            )
        )

    def _chat_chunk(self, index: int, piece: Piece) -> bytes:
        first = index not in self._started
        chunk = ChatChunkChoice(
            index=index,
            delta=Delta.of(piece, self._generation.id, index),
            logprobs=self._chat_logprobs(piece.entries),
            finish_reason=piece.finish,
            stop_reason=piece.stop_reason,
            token_ids=self._token_ids(piece.tokens),
        )
        return self._chat_event(chunk, self._answer.prompts[0] if first else None)

    def _chat_event(self, choice: ChatChunkChoice, prompt: Prompt | None = None) -> bytes:
        return self._event(
            ChatChunk(
                id=self._generation.id,
                created=self._generation.created,
                model=self._generation.model,
                choices=[choice],
                usage=self._usage_so_far(),
                system_fingerprint=self._fingerprint(choice),
                prompt_token_ids=self._token_ids(prompt.tokens) if prompt else UNSET,
                prompt_logprobs=self._prompt_logprobs(prompt) if prompt else UNSET,
            )
        )

    def _end(self) -> bytes:
        if not self._generation.include_usage:
            return DONE
        chunk = Completion if self._generation.kind == "completion" else ChatChunk
        last = chunk(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=[],
            usage=self._answer.usage,
            system_fingerprint=self._answer.fingerprint(self._answer.choices),
        )
        return self._event(last) + DONE

    def _usage_so_far(self) -> Usage | UnsetType | None:
        if self._generation.continuous_usage:
            return self._answer.usage
        return None if self._generation.include_usage else UNSET

    def _fingerprint(self, choice: CompletionChoice | ChatChunkChoice) -> str | UnsetType:
        return self._answer.fingerprint([choice.index]) if choice.finish_reason else UNSET

    def _event(self, chunk: Completion | ChatChunk) -> bytes:
        return event(_encoder.encode(chunk))

    # --- one body -------------------------------------------------------------------------------

    def whole(self, pieces: Mapping[int, Piece]) -> bytes:
        """The finished answer, given all pieces of each choice joined."""
        shown = list(enumerate(self._ranked(pieces)))
        fingerprint = self._answer.fingerprint(self._answer.choices)
        if self._generation.kind == "completion":
            choices = [
                self._completion_choice(number, index, pieces[index], first=True)
                for number, index in shown
            ]
            return _encoder.encode(
                Completion(
                    id=self._generation.id,
                    created=self._generation.created,
                    model=self._generation.model,
                    choices=choices,
                    usage=self._answer.usage,
                    system_fingerprint=fingerprint,
                )
            )
        return _encoder.encode(
            ChatCompletion(
                id=self._generation.id,
                created=self._generation.created,
                model=self._generation.model,
                choices=[self._chat_choice(number, pieces[index]) for number, index in shown],
                usage=self._answer.usage,
                system_fingerprint=fingerprint,
                prompt_token_ids=self._token_ids(self._answer.prompts[0].tokens),
                prompt_logprobs=self._prompt_logprobs(self._answer.prompts[0]),
            )
        )

    def _ranked(self, pieces: Mapping[int, Piece]) -> list[int]:
        """The choices to show: of each prompt the best `n`, by mean logprob, best first."""
        n, best_of = self._generation.n, self._generation.best_of
        if n == best_of:
            return sorted(pieces)
        candidates: dict[int, list[int]] = defaultdict(list)
        for index in sorted(pieces):
            candidates[index // best_of].append(index)
        return [
            index
            for group in candidates.values()
            for index in sorted(group, key=lambda index: -_mean_logprob(pieces[index]))[:n]
        ]

    def _chat_choice(self, number: int, piece: Piece) -> ChatChoice:
        return ChatChoice(
            index=number,
            message=ChatAnswer.of(piece, self._continued, self._generation.id, number),
            logprobs=self._chat_logprobs(piece.entries),
            finish_reason=piece.finish,
            stop_reason=piece.stop_reason,
            token_ids=self._token_ids(piece.tokens),
        )

    # --- both -----------------------------------------------------------------------------------

    def _completion_choice(
        self, number: int, index: int, piece: Piece, first: bool
    ) -> CompletionChoice:
        prompt = self._answer.prompt_of(index)
        text, entries = piece.text, piece.entries
        if first and self._generation.echo is not None:
            text = self._generation.echo[index // self._generation.best_of] + text
            entries = self._echoed_entries(prompt) + entries
        return CompletionChoice(
            index=number,
            text=text,
            logprobs=self._completion_logprobs(entries),
            finish_reason=piece.finish,
            stop_reason=piece.stop_reason,
            token_ids=self._token_ids(piece.tokens),
            prompt_token_ids=self._token_ids(prompt.tokens) if first else UNSET,
            prompt_logprobs=self._prompt_logprobs(prompt) if first else UNSET,
        )

    def _completion_logprobs(self, entries: list[TokenEntry]) -> CompletionLogprobs | None:
        if self._generation.logprobs is None:
            return None
        return completion_form(entries, self._vocabulary, self._names_by_id)

    def _chat_logprobs(self, entries: list[TokenEntry]) -> ChatLogprobs | None:
        if self._generation.logprobs is None:
            return None
        return chat_form(entries, self._vocabulary, self._names_by_id)

    def _echoed_entries(self, prompt: Prompt) -> list[TokenEntry]:
        if self._generation.logprobs is None:
            return []
        return prompt.entries or [TokenEntry(prompt.tokens[0], 0)]

    def _prompt_logprobs(self, prompt: Prompt) -> PromptForm | UnsetType:
        if self._generation.body.prompt_logprobs is None:
            return UNSET
        entries = prompt.entries or [TokenEntry(prompt.tokens[0], 0)]
        return prompt_form(entries, self._vocabulary)

    def _token_ids(self, tokens: list[int]) -> list[int] | UnsetType:
        return tokens if self._generation.body.return_token_ids else UNSET


def _mean_logprob(piece: Piece) -> float:
    logprobs = [entry.logprob for entry in piece.entries if entry.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
