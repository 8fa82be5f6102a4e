"""One choice of an answer: tokens go in as they arrive, what became certain comes out.

The text is the same however the tokens were grouped on their way: a stop string ends the choice at
the token that completes it, and tokens after it do not count. A token's entry (its logprobs) comes
out once the text in which it begins is certain, so that tokens of a stop string that was cut off do
not appear; neither do they count in the mean by which `best_of` ranks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from pagefleet.params import SamplingParams
from pagefleet.wire import Finish, Numerics, Output, unpack_ints
from pagefleet_gateway.text.detokenizer import Detokenizer
from pagefleet_gateway.text.logprobs import TokenEntry, each_of
from pagefleet_gateway.text.stop import StopStrings
from pagefleet_gateway.tool_parsers.parser import CallDelta, Spoken


@dataclass(slots=True)
class Piece:
    """What became certain of a choice."""

    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Ids that arrived, whether their text is certain or not."""
    finish: str | None = None
    """Why the choice ended, as the API names it."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    reasoning: str = ""
    """What a model that thinks wrote before its answer."""
    spoken: list[Spoken] = field(default_factory=list)
    """The text and calls of tools in their order, where there may be calls."""
    digest: int = 0
    """CRC-32 of all tokens of the choice up to the last of these, as little-endian int32."""
    parts: "list[Piece]" = field(default_factory=list, compare=False)
    """What it was joined of."""

    @property
    def calls(self) -> list[CallDelta]:
        """Of tools."""
        return [each for each in self.spoken if isinstance(each, CallDelta)]

    @property
    def is_text(self) -> bool:
        """Nothing but text became certain."""
        said = self.entries or self.reasoning or self.calls
        return bool(self.text) and self.finish is None and not said

    @classmethod
    def joined(cls, pieces: "Sequence[Piece]") -> "Piece":
        """Consecutive pieces as one."""
        if len(pieces) == 1:
            return pieces[0]
        return cls(
            "".join(piece.text for piece in pieces),
            [entry for piece in pieces for entry in piece.entries],
            [token for piece in pieces for token in piece.tokens],
            pieces[-1].finish,
            pieces[-1].stop_reason,
            "".join(piece.reasoning for piece in pieces),
            [each for piece in pieces for each in piece.spoken],
            pieces[-1].digest,
            [part for piece in pieces for part in piece.parts or [piece]],
        )


class Choice:
    """Turns the tokens of one choice into text.

    include_stop: whether a stop string or stop token that ends the choice is part of its text.
    offset: characters that precede the text in the answer (an echoed prompt).
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        offset: int = 0,
    ) -> None:
        self.count = 0
        """Tokens generated, that of a stop string included."""
        self.digest = 0
        """Their CRC-32."""
        self.numerics: Numerics = 0
        """That the latest of them were computed in."""
        self.finished = False
        self.cut = False
        """A stop string ended it, which whoever generates does not know of."""
        self._params = params
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop, include_stop)
        self._include_stop = include_stop
        self._by_token = bool(stop) or params.logprobs is not None
        self._offset = offset
        self._released = 0
        self._held: list[TokenEntry] = []

    def push(self, output: Output) -> Piece:
        """Take the next tokens in; the choice is not finished."""
        piece = Piece()
        self.numerics = output.numerics
        tokens = unpack_ints(output.tokens)
        if self._by_token:
            self._push_each(tokens, output, piece)
        else:
            self._push_all(tokens, output.finish, piece)
        self.digest = piece.digest = crc32(output.tokens[: 4 * len(piece.tokens)], self.digest)
        if output.finish is not None and not self.finished:
            self._end(piece, output.finish, tokens)
        self._release(piece)
        return piece

    def _push_all(self, tokens: "array[int]", finish: Finish | None, piece: Piece) -> None:
        piece.tokens = tokens.tolist()
        self.count += len(tokens)
        silent = self._ends_silently(tokens, finish)
        piece.text = self._detokenizer.push(piece.tokens[:-1] if silent else piece.tokens)

    def _push_each(self, tokens: "array[int]", output: Output, piece: Piece) -> None:
        logprobs = each_of(output.logprobs) if output.logprobs else [(None, b"")] * len(tokens)
        silent = self._ends_silently(tokens, output.finish)
        for number, (token, (logprob, top)) in enumerate(zip(tokens, logprobs, strict=True), 1):
            self.count += 1
            piece.tokens.append(token)
            if silent and number == len(tokens):
                text, start = "", self._detokenizer.length
            else:
                text, start = self._detokenizer.push_one(token)
            if self._params.logprobs is not None:
                self._held.append(TokenEntry(token, self._offset + start, logprob, top))
            if self._match(piece, text):
                return

    def _match(self, piece: Piece, text: str) -> bool:
        """Let text pass the stop strings; whether one ended the choice."""
        released = self._stop.push(text)
        piece.text += released.text
        if released.match is None:
            return False
        piece.finish, piece.stop_reason = "stop", released.match
        self.finished = self.cut = True
        return True

    def _ends_silently(self, tokens: Sequence[int], finish: Finish | None) -> bool:
        return finish is Finish.STOP and len(tokens) > 0 and not self._include_stop

    def _end(self, piece: Piece, finish: Finish, tokens: Sequence[int]) -> None:
        if self._match(piece, self._detokenizer.finish()):
            return
        piece.text += self._stop.finish()
        piece.finish = finish.value
        last = tokens[-1] if tokens else None
        if finish is Finish.STOP and last in self._params.stop_token_ids:
            piece.stop_reason = last
        self.finished = True

    def _release(self, piece: Piece) -> None:
        self._released += len(piece.text)
        if not self._held:
            return
        if self.finished and not self.cut:
            certain = len(self._held)
        else:
            end = self._offset + self._released
            certain = sum(1 for entry in self._held if entry.offset < end)
        piece.entries += self._held[:certain]
        del self._held[:certain]
