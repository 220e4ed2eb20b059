"""An engine without a model: it speaks the server's messages, and answers with the tokens that it was told to say.

`python tests/fake_engine.py '{"says": [1, 2, 3]}'` is one as a process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moesched.server.messages import (
    Ask,
    Broken,
    Close,
    Ending,
    Failed,
    Frames,
    Leave,
    Logprob,
    Ready,
    Refused,
    Starting,
    State,
    ToEngine,
    ToFront,
    Token,
    frame,
)

READY = Ready("fake", "resident", None, "none", 2, 8, 1024, 512, 256, 2048)
LIKELIEST = 5


class FakeEngine:
    """Answers a token of each request every `pace` seconds; `says` again and again if an answer is longer.

    Attributes:
        asked: the requests so far.
        left: the numbers of requests that were told to leave.
        held: while True, nothing is answered.
        breaks: why each answer is broken off after its first token; empty for none.
    """

    def __init__(self, send: Callable[[bytes], object], says: Sequence[int], pace: float = 0.0) -> None:
        self._send = send
        self._frames = Frames(ToEngine)
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, tuple[Ask, int]] = {}
        self._turning = False
        self._pace = pace
        self.says = list(says)
        self.stop_token = -1
        self.refuses = ""
        self.breaks = ""
        self.asked: list[Ask] = []
        self.left: list[int] = []
        self.closed = False
        self.held = False

    def begin(self) -> None:
        """Say that the weights are loaded."""
        self._tell(Starting("loading weights", 1, 1), READY)

    def feed(self, data: bytes) -> None:
        """Take bytes from the front."""
        for message in self._frames.feed(data):
            if isinstance(message, Ask):
                self.asked.append(message)
                if self.refuses:
                    self._tell(Refused(message.number, self.refuses))
                else:
                    self._open[message.number] = message, 0
            elif isinstance(message, Leave):
                self.left.append(message.number)
                self._open.pop(message.number, None)
            elif isinstance(message, Close):
                self.closed = True
        self.resume()

    def resume(self) -> None:
        """Go on with answers after `held` was set to False."""
        if self._open and not self._turning and not self.held:
            self._turning = True
            self._loop.call_later(self._pace, self._turn)

    def _turn(self) -> None:
        self._turning = False
        tokens: list[Token | Broken] = [
            Broken(ask.number, self.breaks) if self.breaks and count else self._next(ask, count)
            for ask, count in list(self._open.values())
        ]
        self._open = {
            number: (ask, count + 1)
            for (number, (ask, count)), token in zip(self._open.items(), tokens, strict=True)
            if isinstance(token, Token) and token.ending is None
        }
        state = State(len(self._open), 0, 32 * len(self._open), 2048, 1, {"cpu": 0.5, "disk": 0.25})
        self._tell(*tokens, state)
        self.resume()

    def _tell(self, *messages: ToFront) -> None:
        self._send(frame(messages))

    def _next(self, ask: Ask, count: int) -> Token:
        token = self.says[count % len(self.says)]
        ending: Ending | None = (
            "stop" if token == self.stop_token else "length" if count + 1 == ask.new_tokens else None
        )
        logprob = None if ask.logprobs is None else scored(token, ask.logprobs)
        prompt = None
        if ask.echo and count == 0:
            prompt = [None, *(scored(each, ask.logprobs or 0) for each in ask.ids[1:])]
        return Token(ask.number, token, ending, logprob, prompt)


def scored(token: int, likeliest: int) -> Logprob:
    """A token that is the likeliest, and as many others as there is room for."""
    others = [(other, -2.0 - other) for other in range(LIKELIEST) if other != token]
    return Logprob(-0.5, [(token, -0.5), *others][:likeliest])


async def main(options: dict[str, Any], make: type[FakeEngine] = FakeEngine) -> None:
    """Speak on standard input and output until the input ends, or `Close` comes; with `fails`, say that and end."""
    if "fails" in options:
        os.write(1, frame([Failed(options["fails"])]))
        sys.exit(options["code"])
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    engine = make(lambda data: os.write(1, data), options["says"], options.get("pace", 0.0))
    engine.begin()
    while not engine.closed and (data := await reader.read(1 << 16)):
        engine.feed(data)
    if "fails_at_the_end" in options:
        os.write(1, frame([Failed(options["fails_at_the_end"])]))
        sys.exit(2)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1])))
