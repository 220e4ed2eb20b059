"""Checks of a policy over a grid of cases on the virtual clock, as `moesched check` runs them.

First come small models on a device that computes hashes ("on symbols"), with tight memory and uneven durations, to find
faults; then real models and machines, to compare the policy with others. All cases run in a child process, so that a
policy that never ends can be killed.
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
