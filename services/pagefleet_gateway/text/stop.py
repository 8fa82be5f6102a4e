"""Stop strings in text that arrives in pieces.

A generation stops at the first character that completes any of the stop strings; where several are
complete there, the longest counts. This does not depend on where the text is cut into pieces. Only
text that may still turn into a stop string is held back: the longest suffix of the text so far that
is a proper prefix of a stop string.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """Text that is certain now, and the stop string that ended the generation, if one did."""

    text: str
    match: str | None


class StopStrings:
    """Watches the text of one choice for `stop`, none of which is empty.

    include_match: release the stop string itself, too (`include_stop_str_in_output`).
    """

    def __init__(self, stop: Sequence[str], include_match: bool = False) -> None:
        if not all(stop):
            raise ValueError("A stop string must not be empty.")
        self._stop = tuple(stop)
        self._include_match = include_match
        self._held = ""

    def __repr__(self) -> str:
        return f"StopStrings({list(self._stop)!r}, {len(self._held)} characters held)"

    def push(self, text: str) -> Released:
        """Take the next piece of text; nothing may be pushed after a match."""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            end, start, match = min(ends)
            self._held = ""
            return Released(text[: end if self._include_match else start], match)
        start = self._start_of_held(text)
        self._held = text[start:]
        return Released(text[:start], None)

    def finish(self) -> str:
        """What was held back when the generation ended without a match."""
        held, self._held = self._held, ""
        return held

    def _start_of_held(self, text: str) -> int:
        longest = max(map(len, self._stop), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            suffix = text[start:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return start
        return len(text)
