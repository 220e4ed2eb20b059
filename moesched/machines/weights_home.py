"""The memory of the host that a GPU's weights come from in a run."""

from __future__ import annotations

import msgspec


class WeightsHome(msgspec.Struct, frozen=True):
    """The memory of the host that a GPU's weights come from.

    Attributes:
        way: "mapped files" in the page cache, which the GPU copies from by itself; "registered memory" that they were
            read into; or "ordinary memory", from which the host copies them to page-locked buffers.
        reason: why it is no faster way; empty for mapped files.
    """

    way: str
    reason: str

    @property
    def words(self) -> str:
        """A sentence with both."""
        return f"Weights come from {self.way}" + (f": {self.reason}" if self.reason else "")
