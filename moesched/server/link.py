"""The HTTP process's end of the pipe to the engine's process: encodes requests as bytes, decodes tokens.

This module does no I/O itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import msgspec

from moesched.errors import MoeschedError
from moesched.server.errors import EngineFailed
from moesched.server.messages import (
    Ask,
    Broken,
    Close,
    Failed,
    Frames,
    Leave,
    Ready,
    Refused,
    Starting,
    State,
    ToEngine,
    ToFront,
    Token,
    frame,
)

IDLE = State(0, 0, 0, 0, 0, {})


class Arrived(NamedTuple):
    """A message about an answer, and the answer's index among all answers to one HTTP request."""

    answer: int
    message: Token | Refused | Broken


class Mailbox:
    """The messages about all answers to one HTTP request, for the one asyncio task that waits for them."""

    def __init__(self) -> None:
        self._arrived: list[Arrived] = []
        self._came = asyncio.Event()
        self._over: MoeschedError | None = None

    def put(self, arrived: Arrived) -> None:
        """Add a message."""
        self._arrived.append(arrived)
        self._came.set()

    def end(self, why: MoeschedError) -> None:
        """Have `take` raise the error `why` from now on."""
        self._over = why
        self._came.set()

    async def take(self) -> list[Arrived]:
        """Wait for messages, and return all that came.

        Raises:
            ClientLeft, EngineFailed: no more messages will come.
        """
        await self._came.wait()
        if self._over is not None:
            raise self._over
        self._came.clear()
        arrived, self._arrived = self._arrived, []
        return arrived


class EngineLink:
    """Gives numbers to requests, sends them to the engine, and puts the engine's messages into the requests' mailboxes.

    Args:
        write: takes bytes for the engine.
        on_starting: called with each message about the engine's start, such as the pages loaded so far.

    Attributes:
        state: the engine's last message about its load.
        ready: future that gets the message that weights are loaded, or the error if they cannot be loaded.
        ended: future that gets the reason when the engine ends; the reason is empty if the engine was told to end.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        on_starting: Callable[[Starting], object] = lambda starting: None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._write = write
        self._on_starting = on_starting
        self._frames = Frames(ToFront)
        self._numbers = count()
        self._boxes: dict[int, tuple[Mailbox, int]] = {}
        self.state = IDLE
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()

    def ask(self, asks: Sequence[Ask]) -> tuple[Mailbox, list[int]]:
        """Number requests and send them; return the mailbox in which their tokens arrive, and the numbers.

        Raises:
            EngineFailed: the engine has ended.
        """
        if self.ended.done():
            raise EngineFailed(self.ended.result() or "it was closed")
        box = Mailbox()
        numbered = [msgspec.structs.replace(each, number=next(self._numbers)) for each in asks]
        self._boxes.update((each.number, (box, index)) for index, each in enumerate(numbered))
        self._send(numbered)
        return box, [each.number for each in numbered]

    def leave(self, numbers: Sequence[int]) -> None:
        """Tell the engine to cancel these requests; those that have ended are skipped."""
        open_ones = [number for number in numbers if self._boxes.pop(number, None) is not None]
        if open_ones and not self.ended.done():
            self._send([Leave(number) for number in open_ones])

    def close(self) -> None:
        """Tell the engine that no more requests will come."""
        if not self.ended.done():
            self._send([Close()])

    def feed(self, data: bytes) -> None:
        """Decode bytes that the engine wrote, and put the decoded messages into the mailboxes of those who wait.

        Raises:
            BadServerFrame: the bytes are no frame.
        """
        for message in self._frames.feed(data):
            self._take(message)  # type: ignore[arg-type]  # frames of the engine have nothing else

    def end(self, why: str = "") -> None:
        """Note that the engine has ended, and have all mailboxes raise EngineFailed.

        Args:
            why: the reason; empty if the engine was told to end.
        """
        if self.ended.done():
            return
        self.ended.set_result(why)
        failure = EngineFailed(why or "it was closed")
        for box in {box for box, _ in self._boxes.values()}:
            box.end(failure)
        self._boxes.clear()
        if not self.ready.done():
            self.ready.set_exception(failure)
            self.ready.exception()  # the server may have been told to close, and not wait for it any more

    def _send(self, messages: Sequence[ToEngine]) -> None:
        self._write(frame(messages))

    def _take(self, message: ToFront) -> None:
        if isinstance(message, Token | Refused | Broken):
            self._deliver(message)
        elif isinstance(message, State):
            self.state = message
        elif isinstance(message, Ready):
            self.ready.set_result(message)
        elif isinstance(message, Starting):
            self._on_starting(message)
        elif isinstance(message, Failed):
            self.end(message.why)

    def _deliver(self, message: Token | Refused | Broken) -> None:
        found = self._boxes.get(message.number)
        if found is None:
            return  # it was told to leave
        box, index = found
        if not isinstance(message, Token) or message.ending is not None:
            del self._boxes[message.number]
        box.put(Arrived(index, message))
