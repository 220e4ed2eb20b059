"""A trial of a device: a tiny random model under every policy."""

from __future__ import annotations

from collections.abc import Callable

from moesched.doctor.facts import Facts
from moesched.doctor.findings import Finding

Progress = Callable[[float, float, str], object]


def try_device(device: str, facts: Facts, progress: Progress) -> list[Finding]:
    """Run a tiny model on a device under every policy, and say what held."""
    return []
