"""Holds the published errors of predictions of prefill times by other simulators (docs/validation.md)."""

from __future__ import annotations

PREFILL_ERROR, PREFILL_SPREAD = 0.66, 1.96
"""Errors on machines built from names of parts: the median over sources, and the root mean square as a factor."""

PUBLISHED_PREFILLS = "prefill, usual error", f"{PREFILL_ERROR:.0%}"
"""Title and text of a row to show below a predicted prefill: the error of such predictions."""
