"""The text of an answer: complete characters, up to a stop string."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from moesched.inputs.tokenizer import UNFINISHED, Decodes, TextStream
from moesched.server.codec import Codec


class StopStrings:
    """Passes text on until a stop string comes, also one that spans several pieces.

    Attributes:
        found: whether a stop string came.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text, and return the text that can no longer become part of a stop string."""
        if not self._stops or not text:
            return text
        text = self._held + text
        begins = [where for where in map(text.find, self._stops) if where >= 0]
        if begins:
            self.found, self._held = True, ""
            return text[: min(begins)]
        kept = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which `text` ends; 0 if there is none."""
    return next(
        (length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0
    )


class AnswerText:
    """Makes the text of an answer as its tokens come.

    Args:
        context: the ids of the prompt's tokens, since the text of a token depends on its neighbours.
        stops: the texts that end the answer; they are not part of it.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int], stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer, context)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """True once a stop string came."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Add a token, and return the text that has become final."""
        return self._stops.push(self._stream.push(token))

    def finish(self) -> str:
        """Return the text that was held back; an incomplete character at its end is dropped."""
        text = self._stops.push(self._stream.finish().rstrip(UNFINISHED))
        return text + self._stops.finish()


class CharacterCount:
    """Counts the characters of a text as its tokens come.

    Attributes:
        count: the number of characters that are complete.
    """

    def __init__(self, codec: Codec, count: int = 0) -> None:
        self._codec = codec
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.count = count

    def before(self, token: int) -> int:
        """Return the number of characters before a token, and count those that the token completes."""
        data = b"" if self._codec.is_special(token) else self._codec.bytes_of(token)
        begun, _ = self._decoder.getstate()
        if begun and data and not 0x80 <= data[0] < 0xC0:  # another character begins
            self.count += len(self._decoder.decode(b"", final=True))
        before = self.count
        self.count += len(self._decoder.decode(data))
        return before
