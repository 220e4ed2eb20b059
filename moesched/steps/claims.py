"""Claims on a memory for the whole run, and the equal parts that they consist of."""

from __future__ import annotations

from typing import NamedTuple


class Parts(NamedTuple):
    """The equal parts of a claim: a number of slots, tokens or micro-batches."""

    number: int
    unit: str

    def that_fit(self, nbytes: int, free: int) -> str:
        """The number of parts that fit in `free` bytes, in words, if all parts together have `nbytes` bytes."""
        return f"{max(free, 0) * self.number // nbytes:,} {self.unit} would fit"


class Claim(NamedTuple):
    """A need of `nbytes` bytes of a memory; `what` is the claimant in the message "... needs N bytes"."""

    what: str
    nbytes: int
    parts: Parts | None = None


def claim_of_slots(pool: str, slots: int, slot_bytes: int) -> Claim:
    """The claim of a pool for the bytes of all its slots."""
    return Claim(f"pool {pool} of {slots:,} slots", slots * slot_bytes, Parts(slots, "slots"))
