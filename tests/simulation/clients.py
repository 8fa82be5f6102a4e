"""Clients of a simulated cell: what they ask for, and whether they get what the oracle says."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from pagefleet.params import Guide, SamplingParams
from pagefleet.wire import (
    ChoiceState,
    Finish,
    Floats,
    Logprobs,
    Output,
    PromptOutput,
    Rejected,
    Submit,
    pack_ints,
    unpack_ints,
)
from pagefleet_gateway.cell.link import News
from pagefleet_scheduler.decoding import concatenate, finish_of
from pagefleet_worker.simulated.echo_decoder import (
    echo_embedding,
    echo_prompt_logprobs,
    echo_tokens,
)
from tests.echo_cell import DECODER, echo_beams

PREDICTED = 0.3
"""Share of the requests that come with a prediction of their answer."""

LONGEST = 48
"""Tokens of the longest sequence that anybody asks for."""

ADAPTERS = (0, 0, 0, 1, 2)
"""LoRA adapters that requests ask for, each as often as it stands here."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One choice without a fault."""

    tokens: list[int]
    logprobs: Logprobs | None
    finish: Finish | None
    score: float | None = None
    embedding: Floats | None = None


def expect(submit: Submit) -> list[Expected]:
    """All choices of a request, by the oracle."""
    prompt, params = unpack_ints(submit.prompt), submit.params
    if params.embedding is not None:
        embedding = echo_embedding(prompt, params.embedding, submit.salt, params.adapter)
        return [Expected([], None, Finish.LENGTH, None, embedding)] * len(submit.choices)
    if params.beam_width and params.max_tokens:
        return [
            Expected(list(beam.tokens), concatenate(beam.logprobs), beam.finish, beam.score)
            for beam in echo_beams(prompt, params, submit.salt)
        ]
    choices = []
    for choice in range(len(submit.choices)):
        stream = echo_tokens(DECODER, prompt, params, choice, submit.salt)
        last = stream.tokens[-1] if stream.tokens else -1
        finish = finish_of(params, len(stream.tokens), last)
        choices.append(Expected(stream.tokens, concatenate(stream.logprobs), finish))
    return choices


@dataclass
class Client:
    """One request, and what has come of it."""

    submit: Submit
    refusals: frozenset[str] = frozenset()
    """Reasons for which it may be refused."""
    pace: float = 0.0
    """Seconds that it takes to read what came."""
    times: list[float] = field(default_factory=list)
    """When something came."""
    received: dict[int, list[Output]] = field(default_factory=dict)
    prompt_pieces: list[PromptOutput] = field(default_factory=list)
    over: set[int] = field(default_factory=set)
    """Choices that have ended, or that the client left."""
    left: bool = False
    rejected: Rejected | None = None

    def __post_init__(self) -> None:
        self._expected: list[Expected] | None = None
        for choice in self.submit.choices:
            self.received[choice.index] = []

    def __repr__(self) -> str:
        counts = {choice: self._count(choice) for choice in self.received}
        return f"<Client {self.submit.request}, tokens {counts}, over {sorted(self.over)}>"

    @property
    def open(self) -> bool:
        """Whether something is still to come."""
        return not self.left and self.rejected is None and len(self.over) < len(self.received)

    def wants(self, choice: int | None) -> bool:
        """Whether something is still to come of a choice, or of any."""
        return self.open and (choice is None or choice in self.received.keys() - self.over)

    def take(self, news: News, now: float) -> None:
        """See that news continue what was received, and are what the oracle says."""
        self.times.append(now)
        assert self.open, f"news after the end of {self!r}"
        match news:
            case Rejected():
                self.rejected = news
                assert news.reason in self.refusals, f"{self!r} is refused: {news.text}"
            case PromptOutput():
                self.prompt_pieces.append(news)
            case Output():
                self._output(news)

    def had(self) -> list[ChoiceState]:
        """What a gateway says of it when it is resumed: what computed its latest tokens."""
        return [
            ChoiceState(choice, numerics=items[-1].numerics if items else 0)
            for choice, items in self.received.items()
        ]

    def leave(self, choices: Iterable[int] | None) -> None:
        """Wait for some choices, or for anything, no longer."""
        if choices is None:
            self.left = True
        else:
            self.over.update(choices)

    def _output(self, item: Output) -> None:
        choice = item.choice
        assert choice not in self.over, f"choice {choice} goes on after its end: {self!r}"
        before = self._count(choice)
        assert item.position == before, f"choice {choice} continues at {item.position}: {self!r}"
        if self._expected is None:
            self._expected = expect(self.submit)
            if item.finish is not Finish.TIMEOUT:
                self._check_prompt_logprobs()
        expected = self._expected[choice]
        tokens = unpack_ints(item.tokens).tolist()
        wanted = expected.tokens[before : before + len(tokens)]
        assert tokens == wanted, f"choice {choice} gets {tokens} instead of {wanted}: {self!r}"
        self.received[choice].append(item)
        if item.finish is not None:
            self.over.add(choice)
            self._check_end(choice, item, expected)

    def _check_end(self, choice: int, last: Output, expected: Expected) -> None:
        if last.finish is Finish.TIMEOUT and self.submit.left is not None:
            return
        assert self._count(choice) == len(expected.tokens), (
            f"choice {choice} of {self!r} ends early"
        )
        assert last.finish == expected.finish, f"choice {choice} of {self!r} ends by {last.finish}"
        assert last.score == expected.score, f"choice {choice} of {self!r} has another score"
        assert last.embedding == expected.embedding, f"another embedding: {self!r}"
        pieces = [item.logprobs for item in self.received[choice] if item.logprobs is not None]
        assert concatenate(pieces) == expected.logprobs, f"other logprobs: {self!r}"

    def _check_prompt_logprobs(self) -> None:
        submit, alternatives = self.submit, self.submit.params.prompt_logprobs
        if alternatives is None:
            return
        prompt = unpack_ints(submit.prompt)
        whole = echo_prompt_logprobs(
            DECODER, prompt, alternatives, submit.salt, submit.params.adapter
        )
        pieces = concatenate([piece.logprobs for piece in self.prompt_pieces])
        assert pieces == (whole if len(prompt) > 1 else None), f"other prompt logprobs: {self!r}"

    def _count(self, choice: int) -> int:
        return sum(len(item.tokens) // 4 for item in self.received[choice])


FORMS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"eos_token_ids": (3,)},
    "n2": {"choices": 2, "eos_token_ids": (3,)},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "beam": {"choices": 2, "beam_width": 2, "eos_token_ids": (3,), "logprobs": 1},
    "guided beam": {
        "guide": Guide("start: /[a-z]{2,9}( [a-z]+)?/"),
        "choices": 2,
        "beam_width": 2,
        "eos_token_ids": (3,),
    },
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 2, "top_k": 9},
    "repeating": {
        "allowed_token_ids": (5, 9, 3),
        "choices": 2,
        "eos_token_ids": (3,),
        "frequency_penalty": 0.5,
        "logit_bias": {5: 36.0},
        "logprobs": 1,
        "max_tokens": 24,
        "min_tokens": 16,
    },
    "guided": {"guide": Guide("start: /[a-z]{2,9}( [a-z]+)?/"), "eos_token_ids": (3,)},
    "prompt only": {"max_tokens": 0, "prompt_logprobs": 0, "choices": 2, "beam_width": 2},
    "embedding": {"max_tokens": 0, "embedding": 5},
}
"""What the kinds of requests have of their own; drafts are found where one repeats itself."""


def make_submit(name: str, form: str, draw: random.Random, **fixed: int) -> Submit:
    """A request of a form, of one of a few tenants; many begin with the same tokens."""
    fields = {"max_tokens": draw.randint(1, 14), "seed": draw.randrange(2**64)} | fixed
    fields |= FORMS[form]  # type: ignore[arg-type]
    choices: int = fields.pop("choices", 1)
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    prompt = [7] * draw.randint(0, 12) + [draw.randrange(200) for _ in range(draw.randint(1, 14))]
    tenant = draw.choice(["", "", "a", "b"])
    fields["adapter"] = draw.choice(ADAPTERS)
    submit = Submit(
        name,
        0,
        pack_ints(prompt[: LONGEST - fields["max_tokens"]]),
        SamplingParams(**fields),
        [ChoiceState(choice) for choice in range(choices)],
        priority=draw.choice([0, 0, 0, -2, 3]),
        salt=draw.choice([b"", b"", b"tenant"]) + bytes(fields["adapter"]),
        window=draw.choice([0, 0, 2, 5]) if "beam" not in form else 0,
        tenant=tenant,
        weight={"a": 0.1, "b": 5.0}.get(tenant, 1.0),
    )
    if draw.random() < PREDICTED:
        submit = replace(submit, prediction=pack_ints(predict(submit, draw)))
    return submit


def predict(submit: Submit, draw: random.Random) -> list[int]:
    """What a client takes for the answer: most of it, with other tokens in places."""
    tokens = expect(submit)[0].tokens
    start = draw.randint(0, len(tokens))
    return [draw.randrange(200) if draw.random() < 0.15 else token for token in tokens[start:]]
