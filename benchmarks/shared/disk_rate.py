"""The rate at which a device reads a model's pages from the disk, taken in a moment: others share the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import cycle
from typing import NamedTuple

from benchmarks.shared.decoding import Model
from moesched.devices.shared.arena import Arena
from moesched.devices.shared.page_reader import PageReader
from moesched.devices.torch.disk_reads import DiskReads
from moesched.models.layout import Page

SECONDS = 0.5
"""Of a reading."""


class DiskRate(NamedTuple):
    """Reads pages past the page cache, one after the other, as transfers of single pages do."""

    reader: PageReader
    slots: Arena
    reads: DiskReads
    pages: Iterator[Page]

    def gbs(self) -> float:
        """GB/s."""
        started, before = time.perf_counter(), self.reader.bytes_read
        for number, page in enumerate(self.pages):
            self.reads.run(self.reader.reads(page, self.slots.slot(number % 2)))
            if time.perf_counter() - started > SECONDS:
                break
        return round((self.reader.bytes_read - before) / (time.perf_counter() - started) / 1e9, 2)


@contextmanager
def disk_rate(model: Model) -> Iterator[DiskRate]:
    """Open a model's files for readings."""
    with PageReader(model.checkpoint, model.layout) as reader, closing(DiskReads()) as reads:
        yield DiskRate(reader, Arena(2, reader.slot_bytes), reads, cycle(model.layout.pages))
