"""How the tokens of a request are chosen: `SamplingParams`, valid by construction.

The gateway makes them from a client's JSON, the wire carries them, a worker obeys them. Everyone
may rely on their ranges: these are checked when they are made, and again when they are decoded.
"""

import math
from functools import cached_property
from typing import Self

import msgspec

MAX_CHOICES = 16
"""Choices that one request may ask for (`n` and `best_of`)."""

MAX_LOGPROBS = 20
"""Alternatives whose logprobs a client may ask for at one position."""

MAX_CANDIDATES = 128
"""Alternatives that a worker reports at one position; a beam search looks at so many."""

MAX_REPETITION_PENALTY = 1000.0
"""The least is its inverse: with more extreme ones, logits leave the range of float32."""

MAX_LENGTH_PENALTY = 10.0
"""The least is its negative: with more extreme ones, powers of lengths leave that of float64."""

MAX_GRAMMAR_CHARACTERS = 1 << 18
"""Length of a guide's grammar; compiled, a literal takes 400 bytes per character."""

MAX_GRAMMAR_ITEMS = 10_000
"""Parser items that a guide may need for one token; what is more ambiguous is refused."""

MAX_FORCED_BYTES = 1 << 14
"""Consecutive bytes about which a guide may leave no choice: all that are left are tokenized again
for every token, which took a worker 10 to 40 ms with a pattern of 60,000 literal characters."""


class Guide(msgspec.Struct, array_like=True, frozen=True):
    """A grammar that every answer obeys: a choice may end only when its text is complete."""

    grammar: str
    """In llguidance's syntax: Lark, or JSON that holds grammars (its docs, "syntax")."""
    to_end: bool = False
    """End only where nothing more may follow: the client asked to ignore the end of sequence."""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True, dict=True):
    """Everything that decides which tokens follow a prompt, besides the prompt and the model.

    Token ids are not compared with a vocabulary here; `check_vocabulary` does that.

    Raises:
        ValueError: a value is out of its range; the message begins with the field's name.
    """

    max_tokens: int
    """Tokens to generate at most, per choice; 0 only computes the prompt."""
    seed: int
    """64 bits, never absent: the gateway draws one if the client gave none."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    """Tokens before which no end-of-sequence or stop token is chosen."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the choice; empty if the client asked to ignore the end of sequence."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the choice too, and are named to the client as the reason."""
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token may not follow the others."""
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    """How many alternatives to report beside each chosen token; None: not even its own logprob."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on."""
    beam_width: int = 0
    """Beams of a beam search; 0 samples."""
    length_penalty: float = 1.0
    """Exponent on the length that divides a beam's summed logprobs."""
    early_stopping: bool | None = False
    """When a beam search ends (`pagefleet_scheduler.beam`); None is transformers' "never"."""
    guide: Guide | None = None
    """The form of the output, which ends with one of `eos_token_ids`."""
    embedding: int | None = None
    """Wanted instead of tokens: so many numbers of the prompt's embedding, 0 being all of them. It
    is the normed hidden state of the last token, cut to these numbers, then scaled to length 1."""
    adapter: int = 0
    """The LoRA adapter to compute with, counted from 1 in the manifest's order; 0: none."""

    def __post_init__(self) -> None:
        """Refuse what no sampler could obey."""
        finite = (
            ("temperature", self.temperature),
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
            ("repetition_penalty", self.repetition_penalty),
            ("length_penalty", self.length_penalty),
        )
        for name, value in finite:
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, not {value}")
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise ValueError("logit_bias must hold finite numbers")
        ranges = (
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("seed", 0 <= self.seed < 2**64, "a number of 64 bits"),
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            (
                "repetition_penalty",
                1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
                f"between {1 / MAX_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}",
            ),
            (
                "length_penalty",
                abs(self.length_penalty) <= MAX_LENGTH_PENALTY,
                f"between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}",
            ),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("bad_words", all(self.bad_words), "sequences of at least one token"),
            ("allowed_token_ids", self.allowed_token_ids != (), "absent or not empty"),
            ("beam_width", 0 <= self.beam_width <= MAX_CHOICES, f"0 to {MAX_CHOICES}"),
            (
                "guide",
                self.guide is None or len(self.guide.grammar) <= MAX_GRAMMAR_CHARACTERS,
                f"a grammar of at most {MAX_GRAMMAR_CHARACTERS} characters",
            ),
            ("stop_token_ids", self.candidates <= MAX_CANDIDATES, "fewer with a beam search"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_CANDIDATES, f"0 to {MAX_CANDIDATES}"),
            (
                "prompt_logprobs",
                0 <= (self.prompt_logprobs or 0) <= MAX_CANDIDATES,
                f"0 to {MAX_CANDIDATES}",
            ),
            ("embedding", (self.embedding or 0) >= 0, "0 (all of it) or more"),
            ("embedding", self.embedding is None or self.max_tokens == 0, "absent beside tokens"),
            ("adapter", 0 <= self.adapter < 2**31, "0 (none) or more, of 32 bits"),
        )
        for name, holds, wanted in ranges:
            if not holds:
                raise ValueError(f"{name} must be {wanted}")

    def check_vocabulary(self, size: int) -> Self:
        """Return self if every token id in it is below `size`.

        Raises:
            ValueError: one is not; the message begins with the field's name.
        """
        named = (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("bad_words", [token for word in self.bad_words for token in word]),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        )
        for name, tokens in named:
            for token in tokens:
                if not 0 <= token < size:
                    raise ValueError(f"{name} holds {token}, outside the vocabulary of {size}")
        return self

    @cached_property
    def bad_endings(self) -> dict[int, dict[tuple[int, ...], list[int]]]:
        """The last tokens of bad words, by the number of tokens before them and then by those
        tokens, so that a step looks up as many as there are lengths, not words.
        """
        endings: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for word in self.bad_words:
            of_length = endings.setdefault(len(word) - 1, {})
            of_length.setdefault(word[:-1], []).append(word[-1])
        return endings

    def ends(self, token: int) -> bool:
        """Whether `token` ends a choice that has `min_tokens`."""
        return token in self.eos_token_ids or token in self.stop_token_ids

    @property
    def candidates(self) -> int:
        """Continuations that a step of its beam search looks at; 0 without one."""
        return max(2, 1 + len({*self.eos_token_ids, *self.stop_token_ids})) * self.beam_width

    @property
    def confines(self) -> bool:
        """Whether tokens are masked, so that at some position none may be left."""
        return (
            self.guide is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
            or self.min_tokens > 0
        )

    @property
    def reshapes_by_history(self) -> bool:
        """Whether the logits of a position depend on the tokens before it."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.bad_words)
            or self.guide is not None
        )
