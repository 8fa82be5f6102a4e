"""The answer to a request as it grows: news from the scheduler in, pieces of choices out.

Choices are numbered as the client sees them, over all prompts. Logprobs of a prompt are whole
before the first piece of its choices (the link sees to that), and tokens that came out of the
prefix cache are counted once for each prompt, whatever happened to the request on its way.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from msgspec import UNSET, UnsetType

from pagefleet.wire import Finish, Output, PromptOutput, Rejected, unpack_ints
from pagefleet_gateway.answers.choice import Choice, Piece
from pagefleet_gateway.answers.message import MessageReader
from pagefleet_gateway.cell.link import News
from pagefleet_gateway.cell.outputs import one_by_one, parted
from pagefleet_gateway.errors import aborted, from_rejection, internal_error, too_late
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.completion_object import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from pagefleet_gateway.rendering.foretold import Foretold, Prediction
from pagefleet_gateway.requests.generation import Generation
from pagefleet_gateway.resume import changed
from pagefleet_gateway.text.detokenizer import Detokenizer
from pagefleet_gateway.text.logprobs import TokenEntry, each_of


@dataclass
class Prompt:
    """One prompt of the request and what is known of it."""

    tokens: list[int]
    request: str
    offsets: list[int]
    """Where each token's text begins."""
    entries: list[TokenEntry] = field(default_factory=list)
    """With logprobs, as far as they came in; the first has none."""
    cached: int | None = None
    """Tokens that came out of the prefix cache."""
    embedding: bytes = b"null"
    """As JSON, once it is there."""


class Answer:
    """What a request has been answered so far.

    Raises:
        ApiError: from `take`; the request was refused or failed.
    """

    def __init__(self, generation: Generation, model: ServedModel) -> None:
        self.generation = generation
        self.prompts = [
            Prompt(tokens, submit.request, _offsets(tokens, generation, model))
            for tokens, submit in zip(generation.prompts, generation.submits, strict=True)
        ]
        self.choices = {
            state.index: self._new_choice(number, model)
            for number, submit in enumerate(generation.submits)
            for state in submit.choices
        }
        form = generation.message
        self._readers = {index: MessageReader(form) for index in self.choices} if form else {}
        predicted = unpack_ints(generation.submits[0].prediction)
        prediction = Prediction(predicted) if predicted else None
        self._foretold = {i: Foretold(prediction) for i in self.choices} if prediction else {}
        self._model = model.manifest.fingerprint
        if adapter := generation.params.adapter:
            self._model += f" {adapter}"
        self._reads_by_token = generation.by_token or generation.thinks
        """Whether it matters which token is part of a thought, or of an event."""
        self._going = set(self.choices)
        self.queued = 0.0
        """Seconds that its requests waited before they first ran, at most."""
        for index, had in generation.had.items():
            if had.finished:
                self.choices[index].count = generation.passed_over(index)
                self.choices[index].finished = True
                self.choices[index].numerics = had.numerics
                self._going.remove(index)
        self._by_request = {prompt.request: prompt for prompt in self.prompts}
        self._usage: Usage | None = None
        """As of the latest news, once it was asked for: each event of a stream may tell it."""

    def __repr__(self) -> str:
        done = sum(choice.finished for choice in self.choices.values())
        return f"<Answer {self.generation.id}: {done} of {len(self.choices)} choices finished>"

    @property
    def finished(self) -> bool:
        """Whether nothing more is to come."""
        return not self._going

    @property
    def going(self) -> int:
        """Choices of which more is to come."""
        return len(self._going)

    @property
    def _begun(self) -> bool:
        return any(choice.count for choice in self.choices.values())

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        if self._usage is None:
            self._usage = self._counted()
        return self._usage

    def _counted(self) -> Usage:
        prompt = sum(len(prompt.tokens) for prompt in self.prompts)
        completion = sum(choice.count for choice in self.choices.values())
        cached = PromptTokensDetails(sum(prompt.cached or 0 for prompt in self.prompts))
        return Usage(prompt, completion, prompt + completion, cached, self._details)

    @property
    def _details(self) -> CompletionTokensDetails | UnsetType:
        thinks, foretold = self.generation.thinks, self._foretold.values()
        if not (thinks or foretold):
            return UNSET
        return CompletionTokensDetails(
            self.thought_tokens if thinks else UNSET,
            sum(each.accepted for each in foretold) if foretold else UNSET,
            sum(each.rejected for each in foretold) if foretold else UNSET,
        )

    @property
    def thought_tokens(self) -> int:
        """Tokens so far in which a model thought."""
        return sum(reader.thought_tokens for reader in self._readers.values())

    def fingerprint(self, indices: Iterable[int]) -> str | UnsetType:
        """Stands for the model, with its adapter, and the class of numerics that these choices were
        computed in, within which equal seeds give equal answers; absent where one is not known.
        """
        classes = sorted({self.choices[index].numerics for index in indices})
        if not all(classes):
            return UNSET
        return f"fp_{sha256(f'{self._model} {classes}'.encode()).hexdigest()[:10]}"

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.generation.best_of]

    def take(self, news: Iterable[News]) -> dict[int, Piece]:
        """What became certain with the news, by choice, of each that there are news of."""
        self._usage = None
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for item in news:
            match item:
                case Output(choice=index):
                    if item.finish is not None:
                        self._check_finish(item.finish)
                        if form := self.generation.embedding:
                            self._by_request[item.request].embedding = form.written(item.embedding)
                    self._learn_of_first_run(item)
                    for part in one_by_one(item) if self._reads_by_token else (item,):
                        if index in self._going:
                            pieces[index] += self._news(index, part)
                case PromptOutput():
                    self._take_prompt(item)
                case Rejected():
                    raise from_rejection(item)
        return {index: self._read(index, parts) for index, parts in pieces.items()}

    def _read(self, index: int, parts: list[Piece]) -> Piece:
        """The parts joined, and read for what they say besides text."""
        reader = self._readers.get(index)
        if reader is None:
            return Piece.joined(parts)
        if not self._reads_by_token:
            parts = [Piece.joined(parts)]
        for part in parts:
            reader.read(part)
        return Piece.joined(parts)

    def _check_finish(self, finish: Finish) -> None:
        if finish is Finish.ERROR:
            raise internal_error("request_failed")
        if finish is Finish.TIMEOUT and not self._begun:
            raise too_late()
        if finish is Finish.ABORT and self.generation.strict:
            raise aborted()

    def _news(self, index: int, item: Output) -> list[Piece]:
        """What became certain; an empty piece where the client of a resumed stream has it all."""
        missing = self.generation.passed_over(index) - self.choices[index].count
        if missing <= 0:
            return [self._push(index, item)]
        known, new = parted(item, missing)
        piece = self._push(index, known)
        if index in self._readers:
            self._readers[index].read(piece)
        return [self._push(index, new) if new.tokens or new.finish else Piece()]

    def _push(self, index: int, item: Output) -> Piece:
        choice = self.choices[index]
        piece = choice.push(item)
        if index in self._foretold:
            self._foretold[index].push(piece.tokens)
        if had := self.generation.passed_over(index):
            ends_early = choice.finished and choice.count < had and piece.finish != Finish.TIMEOUT
            differs = choice.count == had and choice.digest != self.generation.had[index].digest
            if ends_early or differs:
                raise changed()
        if self.generation.strict and piece.finish == Finish.TIMEOUT:
            piece.finish = Finish.LENGTH.value
        if choice.finished:
            self._going.remove(index)
        return piece

    def cut_choices(self, indices: Iterable[int]) -> Iterator[tuple[str, int]]:
        """Request and number of those choices that a stop string ended."""
        for index in indices:
            if self.choices[index].cut:
                yield self.prompt_of(index).request, index

    def _new_choice(self, number: int, model: ServedModel) -> Choice:
        generation = self.generation
        body = generation.body
        detokenizer = Detokenizer(
            model.vocabulary,
            generation.prompts[number] if generation.continues_prompt else (),
            body.skip_special_tokens is not False and not generation.keeps_special,
        )
        return Choice(
            generation.params,
            detokenizer,
            generation.stop,
            include_stop=bool(body.include_stop_str_in_output),
            offset=len(generation.echo[number]) if generation.echo else 0,
        )

    def _learn_of_first_run(self, item: Output) -> None:
        prompt = self._by_request[item.request]
        if prompt.cached is None:
            prompt.cached = item.cached
            self.queued = max(self.queued, item.queued / 1e6)

    def _take_prompt(self, item: PromptOutput) -> None:
        prompt = self._by_request[item.request]
        if not prompt.entries:
            prompt.entries.append(TokenEntry(prompt.tokens[0], prompt.offsets[0]))
        for position, (logprob, top) in enumerate(each_of(item.logprobs), item.position):
            prompt.entries.append(
                TokenEntry(prompt.tokens[position], prompt.offsets[position], logprob, top)
            )


def _offsets(tokens: list[int], generation: Generation, model: ServedModel) -> list[int]:
    if generation.params.prompt_logprobs is None:
        return []
    skip = generation.body.skip_special_tokens is not False
    detokenizer = Detokenizer(model.vocabulary, (), skip)
    return [detokenizer.push_one(token)[1] for token in tokens]
