"""The policy that Least-Stale improves on: the same prefetches, into a cache that evicts what was used longest ago."""

from __future__ import annotations

from moesched.dispatch import LeastRecentlyUsed
from moesched.policies.least_stale import LeastStaleCache


class LruPrefetching(LeastStaleCache):
    """`least_stale` with another rule."""

    rule = LeastRecentlyUsed
