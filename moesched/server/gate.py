"""Who gets in: a bounded number of requests at once, and none once the server closes."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moesched.server.errors import ApiError, bad_request

REMEMBERED = 64
"""Requests whose ends tell how fast others will end."""
LONGEST_WAIT = 60


class Gate:
    """Counts the answers that run or wait.

    Args:
        most: the most answers at once.
        clock: seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.inside = 0
        self.closed = False
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=REMEMBERED)
        self._changed = asyncio.Event()

    @contextmanager
    def entered(self, answers: int) -> Iterator[None]:
        """Let a request in that asks for some answers, until the context ends.

        Raises:
            ApiError: the server closes, is full, or never has so much room.
        """
        if self.closed:
            raise ApiError(
                503, "the server closes: ask another one", kind="server_error", headers={"Retry-After": "10"}
            )
        if answers > self.most:
            raise bad_request(
                f"{answers} answers at once: this server gives at most {self.most}; ask for fewer", "n"
            )
        if self.inside + answers > self.most:
            raise ApiError(
                429,
                f"{self.inside} answers run or wait, and at most {self.most} may: try again later",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(self.retry_seconds(answers))},
            )
        self.inside += answers
        try:
            yield
        finally:
            self.inside -= answers
            self._ends.extend([self._clock()] * answers)
            self._changed.set()

    def retry_seconds(self, answers: int) -> int:
        """Seconds until there is room for more answers, by the rate at which others ended lately."""
        if len(self._ends) < 2 or self._ends[-1] <= self._ends[0]:
            return 1
        rate = (len(self._ends) - 1) / (self._ends[-1] - self._ends[0])
        lacking = self.inside + answers - self.most
        return min(max(math.ceil(lacking / rate), 1), LONGEST_WAIT)

    async def drained(self) -> None:
        """Let nobody in any more, and wait until all answers have ended."""
        self.closed = True
        while self.inside:
            self._changed.clear()
            await self._changed.wait()
