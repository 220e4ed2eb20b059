"""The accesses of pools, from a run's pools to plain values."""

from __future__ import annotations

from moesched.models.layout import Page
from moesched.steps.access_log import AccessLog, Left, Used
from moesched.steps.memory import Pool, counts_of
from moesched.trace.recording import LEFT, USED, CachedPage, CacheRule, PoolAccesses


def title_of(pool: Pool) -> str:
    """The pool's name and memory, such as "experts in gpu"."""
    return f"{pool.name} in {pool.memory.name}"


def log_accesses(pool: Pool) -> None:
    """Have a pool log its accesses, unless its order follows from its transfers."""
    counts = counts_of(pool)
    if counts.caches or pool.replacement == "lru":
        counts.accesses = AccessLog(counts.caches)


def accesses_of(rank: int, pool: Pool) -> PoolAccesses | None:
    """The accesses of a pool; None if they are needed and were not logged, or not those of steps that were repeated."""
    counts = counts_of(pool)
    own = pool.replacement if isinstance(pool.replacement, str) else "rule"
    empty = PoolAccesses(rank=rank, pool=title_of(pool), slots=len(pool.slots), replacement=own)
    if counts.accesses is None:
        return None if counts.caches or own == "lru" else empty
    pages: dict[int, Page] = {}
    accesses: list[tuple[int, ...]] = []
    for access in counts.accesses:
        if isinstance(access, Used):
            pages[access.page.id] = access.page
            accesses.append((USED, access.cache, access.page.id, access.step, access.tokens))
        elif isinstance(access, Left):
            pages[access.page.id] = access.page
            accesses.append((LEFT, access.cache, access.page.id))
        else:
            pages.update((page.id, page) for page in access.pages)
            accesses.append((access.transfer, *(page.id for page in access.pages)))
    return PoolAccesses(
        rank=rank,
        pool=empty.pool,
        slots=empty.slots,
        replacement=own,
        caches=[CacheRule(cache.rule_name, cache.room) for cache in counts.caches],
        pages=[CachedPage(page.id, page.layer, page.expert) for _, page in sorted(pages.items())],
        accesses=accesses,
    )
