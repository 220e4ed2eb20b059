"""Claims: the bytes that one user of a memory, such as a pool, needs for the whole run."""

from __future__ import annotations

from typing import NamedTuple


class Parts(NamedTuple):
    """The equal parts of the bytes that a user of a memory needs, such as the slots of a pool.

    Attributes:
        number: number of parts.
        unit: their name in messages, such as "slots" or "tokens".
    """

    number: int
    unit: str

    def that_fit(self, nbytes: int, free: int) -> str:
        """Return how many of the parts would fit, in words for a message.

        Args:
            nbytes: bytes of all parts together.
            free: bytes that are free.
        """
        return f"{max(free, 0) * self.number // nbytes:,} {self.unit} would fit"


class Claim(NamedTuple):
    """The bytes of a memory that one of its users needs for the whole run.

    Attributes:
        what: the user of the bytes in words, the subject of the message "... needs N bytes".
        nbytes: the bytes needed.
        parts: the equal parts that the bytes consist of; None if they have none.
    """

    what: str
    nbytes: int
    parts: Parts | None = None


def claim_of_slots(pool: str, slots: int, slot_bytes: int) -> Claim:
    """Return the claim of a pool for the bytes of all its slots.

    Args:
        pool: the pool's name.
        slots: number of slots.
        slot_bytes: bytes of a slot.
    """
    return Claim(f"pool {pool} of {slots:,} slots", slots * slot_bytes, Parts(slots, "slots"))
