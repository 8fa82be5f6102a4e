"""Beam searches that a real model made, recorded so that any scheduler can go through them again.

How much memory beams share depends on which beam each one continues, and so on a model's scores:
random ones share far too much. What matters of the scores is this choice alone; a `BeamTape` holds
it, and `BeamReplay` makes up scores that lead to it. `record_beams` makes a tape; the one that lies
beside this file is SmolLM2-135M-Instruct's.
"""

from pathlib import Path
from typing import Self

import msgspec

from pagefleet.wire import Logprobs, pack_floats, pack_ints
from pagefleet_scheduler.sequence import Sequence

TAPE = Path(__file__).with_name("smollm2_beams.json")

_STEP = 0.01
"""Between the made-up scores of two beams."""

_HOPELESS = -1e6
"""A score that no beam goes on with."""


class BeamTape(msgspec.Struct, frozen=True):
    """The choices of some searches."""

    model: str
    searches: dict[int, list[str]]
    """Of each width, a string a search: for each step one digit a beam, in the beams' order, which
    is the number of the beam that it continues. The first step continues the prompt: zeros."""

    @classmethod
    def read(cls, path: Path = TAPE) -> Self:
        """A tape in a file.

        Raises:
            OSError: the file cannot be read.
            msgspec.DecodeError: it holds no tape.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def write(self, path: Path = TAPE) -> None:
        """Put the tape into a file, a search a line."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def parents(self, width: int, search: int, step: int) -> list[int]:
        """Which beam each beam continues; after its last step, a search repeats from its second."""
        searches = self.searches[width]
        choices = searches[search % len(searches)]
        steps = len(choices) // width
        if step >= steps:
            step = 1 + (step - 1) % (steps - 1)
        return [int(digit) for digit in choices[step * width : (step + 1) * width]]


class BeamReplay:
    """The device's word on beams, such that each search goes as one of the tape's."""

    def __init__(self, tape: BeamTape) -> None:
        self._tape = tape

    def __call__(self, beam: Sequence) -> Logprobs:
        """Likely next tokens of a beam, with logprobs that make the scheduler choose as taped."""
        request, search = beam.request, beam.request.search
        assert search is not None
        number = list(request.sequences.values()).index(beam)
        parents = self._tape.parents(search.width, int(request.id), beam.outputs)
        scores = [-_STEP * rank for rank, parent in enumerate(parents) if parent == number]
        scores += [_HOPELESS] * (request.params.candidates - len(scores))
        return Logprobs(
            pack_floats([0.0]),
            pack_ints(range(len(scores))),
            pack_floats(score - search.scores[number] for score in scores),
        )
