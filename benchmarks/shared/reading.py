"""Reads a model's weights with nothing else to do: past the page cache at the disk's rate, and into it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from benchmarks.shared.decoding import Model
from moesched.devices.shared.arena import Arena
from moesched.devices.shared.page_reader import PageReader


def disk_bandwidth(model: Model) -> list[float]:
    """Bytes per second of reading all pages past the page cache, by one thread and by two."""
    reader = PageReader(model.checkpoint, model.layout)
    arena = Arena(4, reader.slot_bytes)

    def read(first: int, threads: int) -> None:
        for number in range(first, len(model.layout.pages), threads):
            reader.read(model.layout.pages[number], arena.slot(first + threads * (number // threads % 2)))

    rates = []
    with reader:
        for threads in (1, 2):
            before, started = reader.bytes_read, time.perf_counter()
            workers = [threading.Thread(target=read, args=(n, threads)) for n in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            rates.append((reader.bytes_read - before) / (time.perf_counter() - started))
    return rates


def warm(directory: Path) -> None:
    """Read a folder's weights into the page cache, from nothing, as any reader would."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while stream.read(1 << 24):
                pass
