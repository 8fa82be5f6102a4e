"""What a step draws: which positions get logits, and every token that is drawn from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

from pagefleet_worker.grammar import Grammars, GuideError
from pagefleet_worker.paging.slots import Row
from pagefleet_worker.sampling.draw import Draw


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step draws: where its logits are taken, and every draw from them.

    positions: rows of the batch's hidden states, one for each row of the logits.
    owners: for each draw the index of its row.
    """

    positions: list[int]
    draws: list[Draw]
    owners: list[int]
    refused: dict[int, str] = field(default_factory=dict)
    """Rows whose grammar cannot be followed, and why."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """All samples that `rows` order: by row, then by position, then by choice."""
        positions: list[int] = []
        draws: list[Draw] = []
        owners: list[int] = []
        for index, (row, batch_end) in enumerate(zip(rows, batch_ends(rows), strict=True)):
            slot = row.slot
            for place in range(row.end - row.logits + 1, row.end + 1):
                history = slot.tokens if place >= len(slot.tokens) else slot.tokens[:place]
                output = place - slot.prompt_length
                draws += [
                    Draw(len(positions), slot.params, history, slot.prompt_length, choice, output)
                    for choice in slot.choices
                ]
                owners += [index] * len(slot.choices)
                positions.append(batch_end - row.end + place - 1)
        return cls(positions, draws, owners)

    def guide(self, rows: Sequence[Row], grammars: Grammars) -> None:
        """Let each draw's grammar say which tokens may come."""
        for at, (owner, draw) in enumerate(zip(self.owners, self.draws, strict=True)):
            slot = rows[owner].slot
            if slot.params.guide is None:
                continue
            try:
                mask = slot.mask(slot.prompt_length + draw.position, grammars)
            except GuideError as error:
                self.refused[owner] = str(error)
            else:
                self.draws[at] = replace(draw, mask=mask)


def batch_ends(rows: Sequence[Row]) -> Iterator[int]:
    """Where in the batch each row's tokens end."""
    return accumulate(len(row.tokens) for row in rows)
