"""The interface of eviction rules, which choose the page of a pool that makes room for another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from moesched.models.layout import Page


@runtime_checkable
class Eviction(Protocol):
    """Chooses the page of a pool that makes room for another page: an argument of `Plan.pool`.

    An object orders the pages of one pool in one run; given a class, each pool makes its own object. Its methods are
    called while the policy submits tasks, in program order, and see no clock: the same pages are evicted on every
    machine.
    """

    def used(self, page: Page, step: int, tokens: int) -> None:
        """Note that a task of the step `step` reads the page, or that the page comes to the pool.

        tokens: the task's rows; 0 when the page comes to the pool, and when it is copied to another one. Pages that
            are there before the first step come in step -1.
        """

    def choose(self, pages: Mapping[int, Page]) -> Page:
        """Return the page to evict, one of `pages`.

        pages: the pool's pages, at least one, by `Page.id` in the order of their arrival; those of the fetch that needs
            the room are left out.
        """
