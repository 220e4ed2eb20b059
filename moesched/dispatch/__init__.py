"""Tools for authors of policies: placement, eviction rules, expert latencies, makespans, and base classes.

    from moesched.dispatch import ExpertLatencies, keep_dense, keep_experts, order_of, popularity_of

The names are loaded when they are first used.
"""

from __future__ import annotations

from typing import Any

from moesched.system.lazy_names import load


def __getattr__(name: str) -> Any:
    return load(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *load(__name__, "__all__")})
