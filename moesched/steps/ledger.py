"""Checks that memories, pools and views (the slots that kernels read) agree about bytes, pages and slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moesched.steps.memory import Memory, Pool
from moesched.steps.views import Views


class Ledger:
    """The memories, pools and views of a run; tests whether their accounts of pages, slots and bytes agree."""

    def __init__(self) -> None:
        self._memories: list[Memory] = []
        self._pools: list[Pool] = []
        self._views: list[Views[Any]] = []

    def add(self, memories: Iterable[Memory], pools: Iterable[Pool], views: Iterable[Views[Any]]) -> None:
        """Add memories, pools and views, to be checked later."""
        self._memories += memories
        self._pools += pools
        self._views += views

    def problems(self) -> list[str]:
        """Return all contradictions between the memories, pools and views that were added, each as a line of text."""
        problems = []
        for memory in self._memories:
            problems += ledger_problems(memory, [pool for pool in self._pools if pool.memory is memory])
        for views in self._views:
            problems += view_problems(views)
        return problems


def ledger_problems(memory: Memory, pools: Iterable[Pool] = ()) -> list[str]:
    """Return the contradictions between a memory's reserved bytes, page table and pools' slots, as lines of text."""
    problems = []
    if not 0 <= memory.used <= memory.peak <= memory.capacity:
        problems.append(
            f"{memory.name}: {memory.used:,} bytes used, {memory.peak:,} at the peak, of {memory.capacity:,}"
        )
    for number, slot in memory._table.items():
        if slot.page is None or slot.page.id != number:
            problems.append(f"{memory.name}: page #{number} is not in {slot!r}, where the table has it")
        if slot.pool._held.get(number) is not slot:
            problems.append(
                f"{memory.name}: page #{number} is in the table, but not in pool {slot.pool.name}"
            )
    for pool in pools:
        problems += _pool_problems(pool)
    return problems


def _pool_problems(pool: Pool) -> list[str]:
    problems = []
    empty = [slot.index for slot in pool._empty]
    held = [slot.index for slot in pool._held.values()]
    if sorted(empty + held) != list(range(len(pool.slots))):
        problems.append(
            f"pool {pool.name}: slots {sorted(empty)} empty and {sorted(held)} held are not its slots"
        )
    for number, slot in pool._held.items():
        if pool.memory._table.get(number) is not slot:
            problems.append(f"pool {pool.name}: holds page #{number}, but the table has it elsewhere")
    for slot in pool._empty:
        if slot.page is not None or slot.views:
            problems.append(f"pool {pool.name}: {slot.name} is empty, but not clean")
    return problems


def view_problems(views: Views[Any]) -> list[str]:
    """Check that open views and slots agree: a slot holds the page that a view reads there, and lists the view.

    Returns:
        A line of text for each slot where this is not so.
    """
    problems = []
    for key, view in views.open.items():
        for page, slot in zip(view.pages, view.slots, strict=True):
            if slot.page is not page or views.memory._table.get(page.id) is not slot:
                problems.append(f"view {key} shows {slot.name}, which no longer holds its page")
            if not slot.fixed and view not in slot.views:
                problems.append(f"view {key} reads {slot.name}, which does not list it")
    return problems
