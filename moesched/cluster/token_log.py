"""Keeps the tokens generated so far and the remaining work, so that a run can go on with other nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Remainder(NamedTuple):
    """Consecutive requests that are run together.

    Attributes:
        first_request: index of the first request in the run's prompts.
        prompts: token ids of each request: its prompt, then its tokens so far.
        new_tokens: the largest number of new tokens for each request.
    """

    first_request: int
    prompts: list[list[int]]
    new_tokens: int


class TokenLog:
    """The requests of a run and their tokens.

    Args:
        prompts: token ids of each request's prompt.
        new_tokens: the largest number of new tokens for each request.
        stop_tokens: tokens that end a request; a request's stop token is kept among its tokens.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop_tokens: Collection[int]
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._prompts = [list(prompt) for prompt in prompts]
        self._new_tokens = new_tokens
        self._stop_tokens = frozenset(stop_tokens)
        self._ended: set[int] = set()

    def add(self, fresh: Mapping[int, Sequence[int]], ended: Collection[int] = ()) -> dict[int, list[int]]:
        """Add new tokens, and return those that were added; tokens of finished requests are left out.

        Args:
            fresh: new tokens by the request's index.
            ended: requests of a beam search, which end with these tokens even if the last one is no stop token.
        """
        counted = {request: list(tokens) for request, tokens in fresh.items() if not self.finished(request)}
        for request, tokens in counted.items():
            self.tokens[request] += tokens
        self._ended.update(ended)
        return counted

    def finished(self, request: int) -> bool:
        """Test whether a request has all of its tokens."""
        tokens = self.tokens[request]
        by_itself = bool(tokens) and tokens[-1] in self._stop_tokens
        return by_itself or len(tokens) >= self._new_tokens or request in self._ended

    @property
    def count(self) -> int:
        """Number of generated tokens of all requests."""
        return sum(map(len, self.tokens))

    def remainder(self) -> Remainder | None:
        """Return the requests to run next, as one unbroken range; None if all requests are finished.

        The range covers all unfinished requests that have tokens; if none of them has tokens, all unfinished requests.
        The new run counts indices from `first_request`. As the range has no gaps, each request keeps its index, which
        seeds its random numbers. A finished request in the range runs again from its prompt; `add` drops its tokens.
        """
        left = [request for request in range(len(self.tokens)) if not self.finished(request)]
        begun = [request for request in left if self.tokens[request]]
        requests = begun or left
        if not requests:
            return None
        first, last = requests[0], requests[-1]
        prompts = [
            self._prompts[request] + ([] if self.finished(request) else self.tokens[request])
            for request in range(first, last + 1)
        ]
        return Remainder(first, prompts, self._new_tokens - min(len(self.tokens[each]) for each in requests))
