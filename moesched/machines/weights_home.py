"""Names the kind of host memory from which a run copies weights to the GPU."""

from __future__ import annotations

import msgspec


class WeightsHome(msgspec.Struct, frozen=True):
    """The kind of host memory from which weights are copied to the GPU, and the reason for this kind.

    Attributes:
        way: "mapped files" in the page cache, from which the GPU itself copies; "registered memory" into which weights
            were read; or "ordinary memory", from which the host copies them to page-locked buffers.
        reason: the reason why no faster kind is used; empty for mapped files.
    """

    way: str
    reason: str

    @property
    def words(self) -> str:
        """A sentence with the kind of host memory and the reason for it."""
        return f"Weights come from {self.way}" + (f": {self.reason}" if self.reason else "")
