"""The data of the symbolic device, with a check that no task uses data which another task is changing."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from itertools import count
from typing import Any

from moesched.steps.views import View
from moesched.tasks import Task
from moesched.testing.symbolic.model import symbol

Key = Hashable
"""The name of a piece of data: a slot, or words and numbers such as ("hidden", 2)."""


class Clash(AssertionError):
    """Raised if a task read or wrote data while another task was changing it."""


class Access:
    """Reads and writes data for one task, and notes the keys.

    Attributes:
        start: the time at which the task began.
        reads: keys of the data that the task read.
        writes: the values to write when the task ends, by key.
    """

    def __init__(self, values: Mapping[Key, int], start: int) -> None:
        self._values = values
        self.start = start
        self.reads: set[Key] = set()
        self.writes: dict[Key, int] = {}

    def read(self, key: Key) -> int:
        """Return the present hash of a piece of data, given its key; 0 if nothing was written to it yet."""
        self.reads.add(key)
        return self._values.get(key, 0)

    def write(self, key: Key, value: int) -> None:
        """Give the piece of data at `key` the hash `value` when the task ends."""
        self.writes[key] = value

    def weights(self, view: View[Any]) -> dict[int, int]:
        """Read the pages of a view; return hashes of the experts' weights by expert, and of other weights under -1."""
        held: dict[int, list[int]] = {}
        for page, slot in zip(view.pages, view.slots, strict=True):
            held.setdefault(page.expert, []).append(self.read(slot))
        return {part: symbol("weights", *pages) for part, pages in held.items()}


class Data:
    """Hashes of all data by key, with the time at which each was last read and written.

    On the virtual clock, times are the tasks' starts and ends. On threads, times are counts of events.
    """

    def __init__(self) -> None:
        self.values: dict[Key, int] = {}
        self._written: dict[Key, int] = {}
        self._read: dict[Key, int] = {}
        self._ticks = count()
        self._lock = threading.Lock()

    def begin(self, task: Task) -> Access:
        """Return an object through which a task that begins reads and writes data."""
        return Access(self.values, task.start if task.end >= 0 else next(self._ticks))

    def end(self, task: Task, access: Access) -> None:
        """Store the hashes that a task wrote through `access`, and check the task's reads and writes.

        Raises:
            Clash: while the task ran, another task changed data that it used, or used data that it changed.
        """
        reads, writes = access.reads, access.writes
        with self._lock:
            end = task.end if task.end >= 0 else next(self._ticks)
            for key in reads | writes.keys():
                if self._written.get(key, -1) > access.start:
                    raise Clash(f"{task.label} uses {key} while another task changes it")
            for key in writes:
                if self._read.get(key, -1) > access.start:
                    raise Clash(f"{task.label} changes {key} while another task reads it")
            for key in reads:
                self._read[key] = max(end, self._read.get(key, -1))
            for key, value in writes.items():
                self._written[key] = end
                self.values[key] = value
