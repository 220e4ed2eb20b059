"""Errors of predicted prefills that others measured and published (docs/validation.md)."""

from __future__ import annotations

PREFILL_ERROR, PREFILL_SPREAD = 0.66, 1.96
"""On machines built from names: the median of the sources, and the root mean square of all rows as a factor."""


def published_prefills() -> tuple[str, str]:
    """The error of published prefills, as a row that stands below a predicted one."""
    return "published prefills", f"error {PREFILL_ERROR:.0%}"
