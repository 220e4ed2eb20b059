"""Admission rules: the order in which waiting requests begin to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from moesched.serving.request import Request

MOST_USERS = 10_000
"""Largest number of users that `FairAmongUsers` remembers; with more, it forgets the half who are ahead least."""


class Admission(Protocol):
    """Rule that orders the waiting requests.

    If a request finds no room, those behind it in the order wait, too, so that all requests run in the end.
    """

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Sort all waiting requests, which are in the order of arrival, into the order in which they are to run."""

    def entered(self, request: Request) -> None:
        """Note that a request begins to run."""


class FirstCome:
    """Requests run in the order in which they came."""

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Return the requests as they are."""
        return waiting

    def entered(self, request: Request) -> None:
        """Do nothing: the order does not depend on earlier requests."""


class ShortestPrompt:
    """Short prompts run first, which lowers the mean time to a first token; long ones may wait long."""

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Return the requests with short prompts first; equally short ones stay in the order of arrival."""
        return sorted(waiting, key=lambda request: request.prompt)

    def entered(self, request: Request) -> None:
        """Do nothing: the order does not depend on earlier requests."""


class FairAmongUsers:
    """Users take turns by tokens: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

    Each request gets a start and an end, which count tokens, and requests run in the order of their starts. The end is
    the start plus the most tokens that the request may have. The start is the end of the user's previous request, but
    at least the start of the request that began to run last: users gain and lose nothing by having been away.
    """

    def __init__(self) -> None:
        self._now = 0
        """The start of the request that entered last, or later."""
        self._ends: dict[str, int] = {}
        """The end of each user's last request, of users who are ahead of `_now`."""

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Return the requests by their starts; those with equal starts stay in the order of arrival."""
        ends, starts = dict(self._ends), []
        for request in waiting:
            starts.append(self._start(request.user, ends))
            ends[request.user] = starts[-1] + request.most_tokens
        return [waiting[index] for index in sorted(range(len(starts)), key=starts.__getitem__)]

    def entered(self, request: Request) -> None:
        """Count the tokens of a request that begins to run, and forget users who are not ahead of its start.

        Users are ahead of this start if their last request ends after it. If more than `MOST_USERS` users are
        remembered, about half of them are forgotten in any case: those whose last requests end first.
        """
        start = self._start(request.user, self._ends)
        self._ends[request.user] = start + request.most_tokens
        now = start
        if len(self._ends) > MOST_USERS:
            now = max(start, sorted(self._ends.values())[MOST_USERS // 2])
        if now > self._now:
            self._now = now
            self._ends = {user: end for user, end in self._ends.items() if end > now}

    def _start(self, user: str, ends: Mapping[str, int]) -> int:
        return max(ends.get(user, 0), self._now)


ADMISSIONS: Mapping[str, type[Admission]] = MappingProxyType(
    {"first-come": FirstCome, "shortest-prompt": ShortestPrompt, "fair": FairAmongUsers}
)
"""The shipped admission rules by name."""
