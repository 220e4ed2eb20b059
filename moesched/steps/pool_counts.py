"""Counts of a pool of pages: fetches, hits, misses, and fetched pages that were never read."""

from __future__ import annotations

from operator import add
from typing import NamedTuple

LOADED, FETCHED, SPECULATED = -1, -2, -3
"""The arrival of a page that no step has read yet: before the first step, by a fetch, or by a speculative one."""


class Counted(NamedTuple):
    """The counts of one pool, in pages.

    All reads of a page in one step count as one use. If the step fetches the page again in between, the reads after
    that fetch count as another use.

    Attributes:
        fetched: pages that steps fetched, those whose transfer was cancelled included.
        hits: uses that found the page in the pool, or on its way there by a speculative fetch.
        misses: uses for which the page had to be fetched: the first use after a fetch that is not speculative.
        wasted: fetched pages that left the pool before anything read them.
        cancelled: wasted pages whose transfer was cancelled before it moved any bytes.
    """

    fetched: int
    hits: int
    misses: int
    wasted: int
    cancelled: int


class PoolCounts:
    """The running counts of one pool: the numbers of `Counted`, and a log of them.

    Attributes:
        log: for each step so far, (number of tasks submitted by its end, counts at its end); None unless a recorder
            asks for it.
        skipped: number of tasks of further steps that `repeat` counted, although they were not submitted.
    """

    def __init__(self) -> None:
        self.fetched = self.hits = self.misses = self.wasted = self.cancelled = self.skipped = 0
        self.log: list[tuple[int, Counted]] | None = None

    def now(self) -> Counted:
        """Return the counts so far."""
        return Counted(self.fetched, self.hits, self.misses, self.wasted, self.cancelled)

    def record(self, submitted: int) -> None:
        """Append (number of tasks, counts so far) to the log, if there is one.

        submitted: number of tasks submitted so far.
        """
        if self.log is not None:
            self.log.append((submitted + self.skipped, self.now()))

    def repeat(self, since: Counted, times: int, submitted: int, tasks: int) -> None:
        """Count further steps that were not run, each with the counts of the last step that ran.

        Args:
            since: the counts before the step that is repeated.
            times: number of further steps.
            submitted: number of tasks submitted so far.
            tasks: number of tasks of each step.
        """
        more = [late - early for late, early in zip(self.now(), since, strict=True)]
        for _ in range(times):
            self.fetched, self.hits, self.misses, self.wasted, self.cancelled = map(add, self.now(), more)
            self.skipped += tasks
            self.record(submitted)
