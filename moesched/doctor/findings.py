"""The result of a probe: its state in one line, and the remedy for a trouble."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line about the machine.

    Attributes:
        about: the thing, in a word or two.
        says: its state.
        remedy: what to do about a trouble; empty where all is well.
    """

    about: str
    says: str
    remedy: str = ""

    @property
    def is_trouble(self) -> bool:
        """True if something has to be done."""
        return bool(self.remedy)
