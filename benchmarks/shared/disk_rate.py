"""The rate at which a device reads a model's pages from the disk, taken in a moment: others share the disk."""

from __future__ import annotations

import time
from itertools import cycle

from moesched.devices.shared.arena import Arena
from moesched.devices.shared.page_reader import PageReader
from moesched.devices.torch.disk_reads import DiskReads
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import WeightLayout

SECONDS = 0.5
"""Of a reading."""


class DiskRate:
    """Reads pages of experts past the page cache, one after the other, as a transfer of one page does."""

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout) -> None:
        self._reader = PageReader(checkpoint, layout)
        self._slots = Arena(2, self._reader.slot_bytes)
        self._pages = cycle(page for page in layout.pages if page.expert >= 0)
        self._reads = DiskReads()

    def __call__(self) -> float:
        """GB/s."""
        started, before = time.perf_counter(), self._reader.bytes_read
        for number, page in enumerate(self._pages):
            self._reads.run(self._reader.reads(page, self._slots.slot(number % 2)))
            if time.perf_counter() - started > SECONDS:
                break
        return round((self._reader.bytes_read - before) / (time.perf_counter() - started) / 1e9, 2)
