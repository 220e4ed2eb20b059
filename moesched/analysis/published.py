"""Holds the median and the spread of errors of predicted prefill times against published ones (docs/validation.md)."""

from __future__ import annotations

PREFILL_ERROR, PREFILL_SPREAD = 0.66, 1.96
"""Errors for machines built from names of parts: the median of the sources, and the root mean square, as a factor."""

PUBLISHED_PREFILLS = "prefill, usual error", f"{PREFILL_ERROR:.0%}"
"""Title and cell of the row below a predicted prefill, which shows the usual error of such a prediction."""
