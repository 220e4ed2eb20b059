"""Checks of a policy over a grid of cases on the virtual clock, as `moesched check` runs them.

To find faults, the policy first runs small models on a device that computes hashes ("symbols"), with tight memory and
uneven durations; then it is compared with other policies on real models and machines. All cases run in a child process,
so that a policy that never ends can be killed.
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
