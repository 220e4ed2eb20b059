"""Conformance on clocks in turn: policies run in every case on the plain clock, and share the others out."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.testing import CLOCKS, Case
from moesched.testing.policy_checks import Clock

PLAIN, *OTHERS = CLOCKS


def in_turn(number: int, cases: Sequence[Case]) -> tuple[Sequence[Case], list[Clock]]:
    """Every third case, and a clock other than the plain one; six successive numbers meet each case on each clock."""
    return cases[number % 3 :: 3], [OTHERS[number % len(OTHERS)]]
