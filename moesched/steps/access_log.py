"""The log of a pool's accesses: what a replay of its eviction rules with more room needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from moesched.models.layout import Page

if TYPE_CHECKING:
    from moesched.steps.eviction import RuledPages


class Used(msgspec.Struct, frozen=True, gc=False):
    """A use that was reported to a rule; by 0 tokens when the page comes to its cache."""

    cache: int
    page: Page
    step: int
    tokens: int


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """A transfer, by its number, brings pages to the pool."""

    transfer: int
    pages: tuple[Page, ...]


class Left(msgspec.Struct, frozen=True, gc=False):
    """The policy dropped a page from a cache, or from the pool itself if the cache is -1."""

    cache: int
    page: Page


Access = Used | Fetched | Left


class AccessLog(list[Access]):
    """The accesses of a pool in program order, after those that filled its caches.

    Args:
        caches: those that share the pool, each with its rule.
    """

    def __init__(self, caches: list[RuledPages]) -> None:
        super().__init__()
        self.caches = caches
        for number, cache in enumerate(caches):
            cache.log_to(self, number)
