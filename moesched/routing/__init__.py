"""Routing: the experts of each token, recorded in real runs, generated for simulations, or replayed."""

from __future__ import annotations

from moesched.routing.scores import ScoredTokens
from moesched.routing.seeded import SeededRouting

__all__ = ["ScoredTokens", "SeededRouting"]
