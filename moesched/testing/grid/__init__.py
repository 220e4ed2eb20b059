"""Checks of a policy over a grid of cases on the virtual clock, as `moesched check` runs them.

First small models with tight memory and uneven durations on symbols, which find faults; then models and machines as
they are sold, which tell how the policy compares with others. All of it runs in a process of its own, so that a policy
that never ends is ended.
"""

from __future__ import annotations

from moesched.testing.grid.cells import Cell, cells_of
from moesched.testing.grid.check import check_on_grid
from moesched.testing.grid.results import Advice, CellResult, Fault, GridReport

__all__ = [
    "check_on_grid",
    "Advice",
    "Cell",
    "CellResult",
    "Fault",
    "GridReport",
    "cells_of",
]
