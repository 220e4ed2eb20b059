"""Which experts tokens take: counted and recorded in real runs, drawn where no router runs, and replayed."""

from __future__ import annotations

from moesched.routing.seeded import SeededRouting

__all__ = ["SeededRouting"]
