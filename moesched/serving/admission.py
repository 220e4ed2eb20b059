"""Admission: which of the waiting requests run next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from moesched.serving.request import Request


class Admission(Protocol):
    """Orders the requests that wait.

    The first one that finds no place ends the search: others do not overtake it, so that every request runs in the end.
    """

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """The waiting requests, those first that shall run first; `waiting` is in the order of arrival."""

    def entered(self, request: Request) -> None:
        """Note that a request got a place."""


class FirstCome:
    """Requests run in the order in which they came."""

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """The requests as they are."""
        return waiting

    def entered(self, request: Request) -> None:
        """Note nothing."""


class ShortestPrompt:
    """Short prompts run first, which lowers the mean time to a first token; long ones may wait long."""

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """The requests with short prompts first; of equal ones, those that came first."""
        return sorted(waiting, key=lambda request: request.prompt)

    def entered(self, request: Request) -> None:
        """Note nothing."""


class FairAmongUsers:
    """Users take turns: the one who was given the fewest tokens so far is next."""

    def __init__(self) -> None:
        self._given: Counter[str] = Counter()

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """The requests in turns: as if each user's earlier ones in this list had been given their tokens."""
        given, keyed = self._given.copy(), []
        for number, request in enumerate(waiting):
            keyed.append((given[request.user], number, request))
            given[request.user] += request.prompt + request.new_tokens
        return [request for _, _, request in sorted(keyed, key=lambda key: key[:2])]

    def entered(self, request: Request) -> None:
        """Count the tokens of a request that got a place for its user."""
        self._given[request.user] += request.prompt + request.new_tokens


ADMISSIONS: Mapping[str, type[Admission]] = MappingProxyType(
    {"first-come": FirstCome, "shortest-prompt": ShortestPrompt, "fair": FairAmongUsers}
)
"""The shipped rules by name."""
