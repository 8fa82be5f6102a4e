"""What a gateway keeps of a request that is open at the scheduler: enough to begin it anywhere."""

from array import array
from dataclasses import dataclass, field

import msgspec

from pagefleet.wire import ChoiceState, Numerics, Submit, pack_ints, unpack_ints


@dataclass(slots=True)
class OpenChoice:
    """One choice: every token received, sent on to the client or not."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    finished: bool = False
    numerics: Numerics = 0
    """That the latest of them were computed in; of a resumed stream, what its reader has."""
    allowed: int = 0
    """Tokens that the scheduler may send, counted from the first."""
    credited: bool = False
    """More was allowed since the last submission, and nothing shows yet that it is known."""
    seen: int = 0
    """Tokens that were here at the last beat."""


@dataclass(slots=True)
class OpenSubmission:
    """One prompt whose choices are not all finished."""

    submit: Submit
    """As first handed in; where it `shrinks`, no longer than what fits."""
    opened: float
    shrinks: bool = False
    """Nobody asked for its length: it is as long as what fits."""
    attempt: int = 0
    submitted: float = 0.0
    choices: dict[int, OpenChoice] = field(default_factory=dict)
    prompt_position: int = 1
    """Prompt tokens below it have their logprobs here; the first never has one."""
    prompt_end: int = 1
    """Where the prompt logprobs that were asked for end."""

    @classmethod
    def of(cls, submit: Submit, now: float, shrinks: bool = False) -> "OpenSubmission":
        """Nothing is received yet."""
        choices = {
            choice.index: OpenChoice(finished=choice.finished, numerics=choice.numerics)
            for choice in submit.choices
        }
        opened = cls(submit, now, shrinks, choices=choices)
        if submit.params.prompt_logprobs is not None:
            opened.prompt_end = max(1, len(unpack_ints(submit.prompt)))
        return opened

    def shrink(self, length: int) -> bool:
        """Let prompt and output have `length` tokens together; whether that is less than before."""
        params = self.submit.params
        fitting = max(length - len(self.submit.prompt) // 4, params.min_tokens, 1)
        if not self.shrinks or fitting >= params.max_tokens:
            return False
        shorter = msgspec.structs.replace(params, max_tokens=fitting)
        self.submit = msgspec.structs.replace(self.submit, params=shorter)
        return True

    def handed_over(self, now: float) -> Submit:
        """The next attempt, with everything received so far."""
        self.attempt += 1
        self.submitted = now
        for choice in self.choices.values():
            choice.allowed = len(choice.tokens) + self.submit.window
            choice.credited = False
        return msgspec.structs.replace(
            self.submit,
            attempt=self.attempt,
            age=self.submit.age + now - self.opened,
            left=self._left(now),
            choices=[
                ChoiceState(index, pack_ints(choice.tokens), choice.finished, choice.numerics)
                for index, choice in self.choices.items()
            ],
        )

    def take(self, index: int, count: int) -> dict[int, int]:
        """The client has so many tokens of a choice: what is allowed now, if that is news."""
        window, choice = self.submit.window, self.choices[index]
        if not window or choice.finished or choice.allowed - count > window // 2:
            return {}
        choice.allowed, choice.credited = count + window, True
        return {index: choice.allowed}

    def unanswered_credits(self) -> dict[int, int]:
        """What was allowed and seems not to have arrived: nothing came since the last beat."""
        again = {
            index: choice.allowed
            for index, choice in self.choices.items()
            if choice.credited and not choice.finished and len(choice.tokens) == choice.seen
        }
        for choice in self.choices.values():
            choice.seen = len(choice.tokens)
        return again

    def _left(self, now: float) -> float | None:
        """Seconds until the deadline."""
        left = self.submit.left
        return None if left is None else max(0.0, left - (now - self.opened))

    @property
    def finished(self) -> bool:
        """Nothing more is to come."""
        return all(choice.finished for choice in self.choices.values())

    def positions(self) -> dict[int, int]:
        """Tokens received of each choice that goes on."""
        return {
            index: len(choice.tokens)
            for index, choice in self.choices.items()
            if not choice.finished
        }
