"""What a body asks for, decided: prompts as token ids, parameters without gaps, lengths that fit.

A `Generation` is all that the rest of the gateway knows of a request; `understanding` makes it. The
choices of an HTTP request are numbered over all its prompts: choice i of prompt k has index
k * best_of + i at the scheduler, so that equal prompts in a list are sampled differently.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from msgspec import structs

from pagefleet.params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams
from pagefleet.wire import Submit
from pagefleet_gateway.answers.message import MessageForm
from pagefleet_gateway.bodies.embedding_form import EmbeddingForm
from pagefleet_gateway.bodies.messages_body import MessagesBody
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import ChatBody, CompletionBody, GenerationBody
from pagefleet_gateway.errors import http_error
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.resume import Had, Ticket, request_id
from pagefleet_gateway.tenants import EVERYBODY, Tenant

Kind: TypeAlias = Literal["completion", "chat", "response", "message", "embedding"]


class ContextUnknown(Exception):
    """A prompt is to be cut to what fits, and no worker has said yet what does."""


@dataclass(frozen=True)
class Limits:
    """What holds for a request besides the model's own limits."""

    max_model_len: int
    """Tokens that prompt and output may have together."""
    tenant: Tenant = EVERYBODY
    """Who asks."""
    request_id: str | None = None
    """Names the answer, where the body does not; drawn where neither does."""
    max_choices: int = MAX_CHOICES
    """That one prompt may have."""
    max_logprobs: int = MAX_LOGPROBS
    """Alternatives that may be asked for at a position."""
    strict: bool = False
    """Answers end only for reasons that the OpenAI API knows."""
    bound: str = ""
    """What makes `max_model_len` less than the model's own, in words."""
    certain: bool = True
    """Whether `max_model_len` is no more than what workers hold."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the answer's beginning, which a chat template may tell."""

    def room(self, answer: int) -> int:
        """Tokens of a prompt that is cut to leave so many for its answer.

        Raises:
            ContextUnknown: that is not certain yet, and a cut is for good.
        """
        if not self.certain:
            raise ContextUnknown
        return self.max_model_len - answer


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request that is understood."""

    kind: Kind
    id: str
    """As the client sees it."""
    run: str
    """Tells this run of the request from all others: see `resume.request_id`."""
    model: str
    body: GenerationBody
    prompts: list[list[int]]
    submits: list[Submit]
    """One for each prompt, with the same parameters."""
    n: int
    """Choices the client gets for each prompt."""
    best_of: int
    """Choices that are generated for each prompt."""
    logprobs: int | None
    """Alternatives to show beside each token; None shows no logprobs."""
    echo: list[str] | None
    """The text of each prompt, where it is to precede the answer."""
    ignored: list[str]
    """Fields of the body of which nothing is known."""
    asked: ResponseBody | MessagesBody | None = None
    """The body of a route whose answers are named events; `body` is the chat that it means."""
    message: MessageForm | None = None
    """How the text is to be parted; None: it is content."""
    embedding: EmbeddingForm | None = None
    """How the prompts' embeddings are to be written, where they are what is wanted."""
    strict: bool = False
    """See `Limits`."""
    shrinks: bool = False
    """Nobody asked for its length: it is as long as what fits."""
    created: int
    """Unix time of its beginning."""
    had: Mapping[int, Had] = field(default_factory=dict)
    """What the client of a resumed stream has of each choice; empty if it begins."""

    @property
    def by_token(self) -> bool:
        """Whether it is told token by token, in events that do not depend on what came together."""
        return self.asked is not None

    @property
    def thinks(self) -> bool:
        """Whether thoughts are parted from what it says."""
        return self.message is not None and self.message.thoughts is not None

    @property
    def keeps_special(self) -> bool:
        """Whether special tokens are part of the text."""
        return self.message is not None and self.message.keeps_special

    def passed_over(self, index: int) -> int:
        """Tokens of a choice that a resumed client has and that need not be looked at.

        Events that are counted are made again from the first token.
        """
        return 0 if self.by_token or index not in self.had else self.had[index].count

    @property
    def unfinished(self) -> list[Submit]:
        """Those of `submits` that are to be generated: all but what a resumed client has whole."""
        return [
            submit
            for submit in self.submits
            if not all(choice.finished for choice in submit.choices)
        ]

    @property
    def params(self) -> SamplingParams:
        """Of every prompt."""
        return self.submits[0].params

    @property
    def stop(self) -> list[str]:
        """Strings that end a choice."""
        stop = self.body.stop
        return [stop] if isinstance(stop, str) else stop or []

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer goes on with the prompt's text, rather than being one of its own, of
        which some vocabularies drop the first space. What a grammar allows is kept whole.
        """
        return (
            isinstance(self.body, CompletionBody)
            or bool(isinstance(self.body, ChatBody) and self.body.continue_final_message)
            or (self.params.guide is not None and self.message is None)
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.body.stream_options
        return bool(options and options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream says the usage so far."""
        options = self.body.stream_options
        return bool(options and options.continuous_usage_stats)


def ticket_of(
    generation: Generation, model: ServedModel, tenant: bytes, context: int = 0
) -> Ticket:
    """What makes a stream again, besides its body."""
    return Ticket(
        generation.id,
        generation.created,
        generation.run,
        generation.params.seed,
        model.manifest.fingerprint,
        tenant,
        context,
    )


def resumed(
    generation: Generation, model: ServedModel, ticket: Ticket, had: Mapping[int, Had]
) -> Generation:
    """The same generation as the one that gave the ticket, for a client that has some of it.

    generation: what its body asks for in the ticket's context. Raises:
        ApiError: 410, another model wrote it, or it has other choices.
    """
    if ticket.model != model.manifest.fingerprint:
        text = "This stream cannot be resumed: another model wrote it."
        raise http_error(410, text, "gone")
    if had.keys() != {choice.index for each in generation.submits for choice in each.choices}:
        raise http_error(410, "This stream cannot be resumed: it had other choices.", "gone")
    params = structs.replace(generation.params, seed=ticket.seed)
    submits = [
        structs.replace(
            submit,
            params=params,
            choices=[had[choice.index].state(choice.index) for choice in submit.choices],
            continues=request_id(ticket.run, number),
        )
        for number, submit in enumerate(generation.submits)
    ]
    return replace(
        generation,
        id=ticket.answer,
        created=ticket.created,
        submits=submits,
        had=had,
        shrinks=generation.shrinks and not ticket.context,
    )
