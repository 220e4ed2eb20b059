"""Errors of predictions of prefill times that others measured and published (docs/validation.md)."""

from __future__ import annotations

PREFILL_ERROR, PREFILL_SPREAD = 0.66, 1.96
"""Errors on machines built from names: the median over sources, and the root mean square of all rows as a factor."""


def published_prefills() -> tuple[str, str]:
    """Return (title, text) of a row with the error of such predictions, to be shown below a predicted prefill."""
    return "prefill, usual error", f"{PREFILL_ERROR:.0%}"
