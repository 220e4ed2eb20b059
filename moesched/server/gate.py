"""Admission of requests to the server: a bounded number at once, and none once the server closes."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moesched.server.errors import ApiError, bad_request, closing

REMEMBERED = 256
"""Largest number of answers whose times of ending are kept, to estimate the rate at which answers end."""
LONGEST_WAIT = 60


class Gate:
    """Counts the answers that run or wait, and refuses requests beyond a limit.

    Refused requests are told to come back at different times, spaced by the rate at which answers end.

    Args:
        running: the largest number of answers that run at once.
        waiting: the largest number of answers that wait.
        clock: returns the time in seconds.
    """

    def __init__(self, running: int, waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = running + waiting
        self.inside = 0
        self.closed = False
        self._running = running
        self._clock = clock
        self._seconds_each = 0.0
        self._ends: deque[float] = deque(maxlen=REMEMBERED + 1)
        """The time at which the server became full, then the ends of answers since; the oldest are dropped."""
        self._promised = 0.0
        """The time at which the last refused request is told to come back."""
        self._changed = asyncio.Event()

    @contextmanager
    def entered(self, answers: int, field: str = "n") -> Iterator[None]:
        """Count the answers of a request as running or waiting, until the context ends.

        Args:
            field: name of the request's field that gives the number of answers.

        Raises:
            ApiError: the server closes or is full, or the request has more answers than the server ever gives at once.
        """
        self.require_room(answers, field)
        self.inside += answers
        if self.inside >= self._running and not self._ends:
            self._ends.append(self._clock())
        refused = False
        try:
            yield
        except ApiError:
            refused = True
            raise
        finally:
            self._end(answers, refused=refused)

    def require_room(self, answers: int = 1, field: str = "n") -> None:
        """Check that a request for a number of answers could be taken now.

        Args:
            field: name of the request's field that gives the number.

        Raises:
            ApiError: the server closes or is full, or the request has more answers than the server ever gives at once.
        """
        if self.closed:
            raise closing()
        if answers > self.most:
            raise bad_request(
                f"{answers} answers at once: this server gives at most {self.most}; ask for fewer", field
            )
        if self.inside + answers > self.most:
            raise ApiError(
                429,
                f"{self.inside} answers run or wait, and at most {self.most} may: try again later",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(self._retry_seconds(answers))},
            )

    async def drained(self) -> None:
        """Refuse further requests, and wait until all answers have ended."""
        self.closed = True
        while self.inside:
            self._changed.clear()
            await self._changed.wait()

    def _end(self, answers: int, *, refused: bool) -> None:
        """Note that answers have ended.

        Args:
            answers: the number of answers.
            refused: whether the answers ended with an ApiError; then the rate at which answers end leaves them out.
        """
        if self.inside < self._running:
            self._ends.clear()
        elif not refused:
            self._ends.extend([self._clock()] * answers)
        self.inside -= answers
        self._changed.set()

    def _retry_seconds(self, answers: int) -> int:
        """Estimate the seconds after which a request that is refused now should come back.

        All requests that were refused earlier are assumed to come back first. The result is then the time until there
        is room for `answers` more answers, from 1 to `LONGEST_WAIT` seconds.
        """
        now, free = self._clock(), self.most - self.inside
        if len(self._ends) > 1:
            self._seconds_each = (now - self._ends[0]) / (len(self._ends) - 1)
        since = max(self._promised, now - free * self._seconds_each)
        self._promised = since + answers * self._seconds_each
        self._promised = min(self._promised, now + LONGEST_WAIT)
        return max(math.ceil(self._promised - now), 1)
