"""How much of a prediction an answer bore out: `accepted_` and `rejected_prediction_tokens`.

The OpenAI API counts the tokens of the prediction that appeared in the completion, and those that
did not. Both follow from the two texts alone here: they are the same streamed or not, under any
load and after any fault, and whether the answer was drafted from the prediction or not. How many
drafts were fed and kept is no answer to that question: it depends on the load, and where the prompt
holds the same text, as it mostly does, drafts come from there.

An answer is followed through the prediction. As long as it goes on as the prediction does, the
prediction's tokens appear; where it leaves, it is found again by two tokens that stand there one
after the other, behind where it left if there is such a place. A token of the prediction appears
once, however often it is said.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise


class Prediction:
    """Token ids that answers may repeat, and where each two of them stand."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._places = defaultdict[tuple[int | None, int], list[int]](list)
        for place, pair in enumerate(pairwise(tokens)):
            self._places[pair].append(place)

    def place(self, pair: tuple[int | None, int], behind: int) -> int | None:
        """The first place of two tokens at or behind `behind`, or else of all."""
        places = self._places.get(pair)
        if places is None:
            return None
        return places[bisect_left(places, behind) % len(places)]


class Foretold:
    """What one choice has borne out."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._appeared = bytearray(len(prediction.tokens))
        self._next = 0
        self._last: int | None = None
        self._strays = False
        """The last token was not found in the prediction."""

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that appeared."""
        return self._appeared.count(1)

    @property
    def rejected(self) -> int:
        """Those that did not, so far."""
        return len(self._appeared) - self.accepted

    def push(self, tokens: Iterable[int]) -> None:
        """Take the choice's next tokens in."""
        for token in tokens:
            self._strays = not self._follow(token)
            self._last = token

    def _follow(self, token: int) -> bool:
        """Whether the token is found."""
        tokens = self._prediction.tokens
        if self._next == len(tokens) or tokens[self._next] != token:
            pair = self._prediction.place((self._last, token), self._next)
            if pair is None:
                return False
            if self._strays:
                self._appeared[pair] = 1
            self._next = pair + 1
        self._appeared[self._next] = 1
        self._next += 1
        return True
