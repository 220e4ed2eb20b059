"""Sources of requests that arrive over time: a list, or live ones from a server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from moesched.serving.request import Request


class News(NamedTuple):
    """The requests that arrived, and those that left, since the last call of `Arrivals.news`.

    Attributes:
        came: the requests that arrived, in order of arrival.
        departed: the numbers of requests that were cancelled.
    """

    came: list[Request]
    departed: list[int]


class Arrivals(Protocol):
    """The requests of a run, as they arrive."""

    @property
    def over(self) -> bool:
        """True once no more requests will arrive."""

    def news(self, now: int) -> News:
        """Return the arrivals and departures since the last call, up to the time `now`.

        Args:
            now: nanoseconds since the weights were loaded, as for the other methods.
        """

    def until_next(self, now: int) -> int:
        """Return the nanoseconds until the next arrival, at least 1; for virtual clocks only."""

    async def wait(self, now: int) -> None:
        """Wait until a request arrives or leaves, or until no more will arrive; called on the real clock only."""


class ListedArrivals:
    """Requests whose arrivals are known before the run.

    Args:
        departures: pairs of a request's number, and the time in nanoseconds at which it is cancelled.
    """

    def __init__(self, requests: Iterable[Request], departures: Iterable[tuple[int, int]] = ()) -> None:
        self._requests = deque(sorted(requests, key=lambda request: (request.arrives, request.number)))
        self._departures = deque(sorted((when, number) for number, when in departures))

    @property
    def over(self) -> bool:
        """True once all requests have arrived."""
        return not self._requests

    def news(self, now: int) -> News:
        """Return the requests that arrived, and those that left, since the last call and up to `now`."""
        news = News([], [])
        while self._requests and self._requests[0].arrives <= now:
            news.came.append(self._requests.popleft())
        while self._departures and self._departures[0][0] <= now:
            news.departed.append(self._departures.popleft()[1])
        return news

    def until_next(self, now: int) -> int:
        """Return the nanoseconds from `now` until the next arrival, at least 1."""
        return max(1, self._requests[0].arrives - now)

    async def wait(self, now: int) -> None:
        """Sleep from `now` until the next arrival."""
        await asyncio.sleep(self.until_next(now) / 1e9)
