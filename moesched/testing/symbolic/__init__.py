"""A device that computes on symbols: every value is a hash of the values that it was computed from.

Two runs end with the same symbols only if every task read what it was meant to read. The device also notes when
each piece of data was read and written, and refuses a task that touched one while another task was changing it.
It runs under both drivers, needs no weights, and takes microseconds a task: a schedule can be tested without a model.

The functions of its verbs repeat what each verb reads and writes. The engine's dependencies come from the table in
`moesched/steps/verbs/table.py`, and a device that took its own reads and writes from there could not find them wrong.
"""

from __future__ import annotations

from moesched.testing.symbolic.device import SymbolicDevice
from moesched.testing.symbolic.model import expected_tokens

__all__ = ["SymbolicDevice", "expected_tokens"]
