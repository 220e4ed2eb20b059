"""The seam of eviction rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from moesched.models.layout import Page


@runtime_checkable
class Eviction(Protocol):
    """Names the page of a pool that makes room for another one: an argument of `Plan.pool`.

    An object orders the pages of one pool in one run; given a class, each pool makes its own object. It is called while
    the policy submits tasks, in program order, and knows no clock: the same pages are evicted on every machine.
    """

    def used(self, page: Page, step: int, tokens: int) -> None:
        """Note that a task of this step reads the page, or that the page comes to the pool.

        tokens: the task's rows; 0 when the page comes to the pool, and when it is copied to another one. Pages that
            are there before the first step come in step -1.
        """

    def choose(self, pages: Mapping[int, Page]) -> Page:
        """Name the page to evict, one of `pages`: the pool's, without those of the fetch that needs the room.

        pages: at least one, by `Page.id`, in the order of their arrival.
        """
