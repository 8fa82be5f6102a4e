"""How many drafts a step is fed: as many as pay for the time that they take.

A draft is a token that may come next, fed on trial behind the last one that is known. Every
position is sampled with its own u = f(seed, choice, position), and a draft is kept only if it is
what was sampled: the stream is the same with and without drafts (Leviathan et al., "Fast Inference
from Transformers via Speculative Decoding", ICML 2023, made exact for seeded sampling).

Whether drafts pay depends on two things, and both are learnt while serving:

- How often they are kept. That depends mostly on the length of the match by which they were found:
  where eight tokens were said before, the ninth is nearly always right. A draft that is kept makes
  the match longer by one.
- What they cost. Up to some number of rows, one more row hardly makes a step longer, because the
  step waits for weights to be read; beyond that, its time grows in proportion. The price of a draft
  is the number of tokens that a step without drafts gives in the time that the draft adds: with one
  sequence a few hundredths of a token, with many nearly a whole one.

A draft is fed while it is likely to bring more tokens for its time than the row does so far, and
while the step does not become `LONGER` by it, because whoever arrives meanwhile waits for its end.
Steps that compute a part of a prompt have none: whoever waits for a first token goes first. The
tokens before a draft must be known, so that drafting rules out lookahead: the pause until the last
result is there has to pay, too.
"""

from collections.abc import Iterable

from pagefleet_scheduler.pace import Pace
from pagefleet_scheduler.prompt_lookup import LONGEST_MATCH, NO_DRAFTS, Drafts, PromptLookup
from pagefleet_scheduler.sequence import Sequence

MOST = 15
"""Drafts per row by default; with the token before them they fill a block."""

KEPT = (0.2, 0.5, 0.65, 0.75, 0.75, 0.8, 0.8, 0.95)
"""Share of drafts that are kept, by the length of their match, before anything is learnt: that of
SmolLM2's greedy answers to questions, summaries and code (benchmarks/RESULTS.md)."""

LEARNING = 1 / 64
"""Weight of the latest draft in that share."""

ROWS_MORE = 16
"""By how many rows, at least, two steps must differ for their difference in time to be no noise."""

LONGER = 2.0
"""How many times as long as without drafts a step may take if all of its rows have some."""

NO_DRAFTS_PAY = 1.0
"""A price that no draft is worth, because none is certain to be kept."""

PAUSE = 0.001
"""Seconds that a worker idles if its next step is ordered only after the last one's result."""


class Speculation:
    """What drafts bring and cost at one worker."""

    def __init__(self, most: int, pace: Pace) -> None:
        self.most = most
        self.drafted = 0
        """Drafts that were fed and judged."""
        self.kept = 0
        self._pace = pace
        self._kept = list(KEPT)

    def __repr__(self) -> str:
        return f"<Speculation {self.kept} of {self.drafted} drafts kept>"

    def price(self, rows: int) -> float:
        """The price of a draft in a step of so many rows with one token each."""
        if not self.most:
            return NO_DRAFTS_PAY
        if not (seconds := self._pace.seconds(rows)):
            return 0.0
        more = max(rows, ROWS_MORE)
        longer = max(self._pace.seconds(rows + more) - seconds, 0.0)
        return longer / more * rows / seconds

    def drafts(self, sequence: Sequence, room: int, price: float) -> Drafts:
        """What to feed behind a sequence's last token: at most `room` drafts, those that pay."""
        if price >= max(self._kept):
            return NO_DRAFTS
        found = _propose(sequence, min(self.most, room, sequence.may_draft))
        count, _ = self._paying(found.match, len(found.tokens), price)
        return Drafts(found.tokens[:count], found.match)

    def pays_to_wait(self, running: list[Sequence]) -> bool:
        """Whether drafts would gain more than it costs to wait for the last step's result."""
        if not self.most:
            return False
        pending = [sequence.pending for sequence in running]
        rows = pending.count(1)
        price = self.price(rows)
        if max(pending, default=0) > 1 or price >= max(self._kept):
            return False
        seconds = self._pace.seconds(rows)
        lost = PAUSE * rows / seconds if seconds else 0.0
        return self._gain(running, price) > lost

    def judge(self, drafts: Drafts, kept: int) -> None:
        """Learn from a row of which so many drafts were kept."""
        self.drafted += len(drafts.tokens)
        self.kept += kept
        for number in range(min(kept + 1, len(drafts.tokens))):
            length = _length_class(drafts.match + number)
            self._kept[length] += LEARNING * ((number < kept) - self._kept[length])

    def _gain(self, running: Iterable[Sequence], price: float) -> float:
        """Tokens that drafts are likely to bring, less their price, once the next tokens are known.

        There will be drafts behind a sequence's next token only if that continues the match.
        """
        gain = 0.0
        for sequence in running:
            if sequence.ahead:
                most = min(self.most, sequence.may_draft - sequence.ahead)
                if match := _propose(sequence, most).match:
                    gain += (
                        self._kept[_length_class(match)] * self._paying(match + 1, most, price)[1]
                    )
        return gain

    def _paying(self, match: int, most: int, price: float) -> tuple[int, float]:
        """How many drafts behind a match pay, and the tokens that they bring beyond their price.

        All other rows are assumed to do as well as this one.
        """
        likely = tokens = time = 1.0
        for count in range(most):
            likely *= self._kept[_length_class(match + count)]
            longer = 1.0 + (count + 1) * price
            if likely * time < price * tokens or longer > LONGER:
                return count, tokens - time
            tokens += likely
            time = longer
        return most, tokens - time


def _propose(sequence: Sequence, count: int) -> Drafts:
    if sequence.lookup is None:
        sequence.lookup = PromptLookup(sequence.request.prediction)
    return sequence.lookup.propose(sequence.tokens, count)


def _length_class(match: int) -> int:
    return min(match, LONGEST_MATCH) - 1
