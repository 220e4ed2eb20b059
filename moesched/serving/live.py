"""Requests that other threads, such as a server's, hand over while a run serves them."""

from __future__ import annotations

import asyncio
from threading import Lock

from msgspec.structs import replace

from moesched.serving.arrivals import News
from moesched.serving.request import Request


class LiveArrivals:
    """Arrivals that any thread adds while the run goes on; the run ends after `close`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._news = News([], [])
        self._closed = False
        self._waiting: asyncio.Future[None] | None = None

    def add(self, request: Request) -> None:
        """Add a request; it arrives at the time at which the run next asks for new requests."""
        with self._lock:
            self._news.came.append(request)
            self._wake()

    def remove(self, number: int) -> None:
        """Cancel the request with this number: its client left, or its answer needs no more tokens."""
        with self._lock:
            self._news.departed.append(number)
            self._wake()

    def close(self) -> None:
        """Have the run end once all requests added so far are done."""
        with self._lock:
            self._closed = True
            self._wake()

    @property
    def over(self) -> bool:
        """True once no more requests will come."""
        with self._lock:
            return self._closed and not self._news.came

    def news(self, now: int) -> News:
        """Return the arrivals and departures since the last call; `now` becomes the requests' time of arrival."""
        with self._lock:
            (came, departed), self._news = self._news, News([], [])
        return News([replace(request, arrives=now) for request in came], departed)

    def until_next(self, now: int) -> int:
        """Return 1 nanosecond for any `now`, to ask again soon, since nobody knows when the next request comes."""
        return 1

    async def wait(self, now: int) -> None:
        """Wait for an arrival, a departure or `close`; `now` has no effect."""
        with self._lock:
            if self._closed or self._news.came or self._news.departed:
                return
            self._waiting = waiting = asyncio.get_running_loop().create_future()
        try:
            await waiting
        finally:  # also if the run is cancelled: its loop ends, and others still add
            with self._lock:
                self._waiting = None

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.get_loop().call_soon_threadsafe(_settle, waiting)


def _settle(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
