"""The data of a symbolic device, and the check that no task touches what another one is changing."""

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
    """A task read or wrote data while another task was changing it."""


class Access:
    """The reads and writes of one task.

    Attributes:
        start: the time at which the task began.
        reads: keys of the data that it read.
        writes: the values to write when the task ends, by key.
    """

    def __init__(self, values: Mapping[Key, int], start: int) -> None:
        self._values = values
        self.start = start
        self.reads: set[Key] = set()
        self.writes: dict[Key, int] = {}

    def read(self, key: Key) -> int:
        """Read the present value of some data; 0 if nothing was written yet."""
        self.reads.add(key)
        return self._values.get(key, 0)

    def write(self, key: Key, value: int) -> None:
        """Set the value that some data gets when the task ends."""
        self.writes[key] = value

    def weights(self, view: View[Any]) -> dict[int, int]:
        """Read the pages of a view; returns a symbol for each expert's pages, with -1 for the dense part."""
        held: dict[int, list[int]] = {}
        for page, slot in zip(view.pages, view.slots, strict=True):
            held.setdefault(page.expert, []).append(self.read(slot))
        return {part: symbol("weights", *pages) for part, pages in held.items()}


class Data:
    """Values by key, with the times of the last read and the last write of each.

    The virtual driver executes a task when its start and end are known. On threads, times are counts of events.
    """

    def __init__(self) -> None:
        self.values: dict[Key, int] = {}
        self._written: dict[Key, int] = {}
        self._read: dict[Key, int] = {}
        self._ticks = count()
        self._lock = threading.Lock()

    def begin(self, task: Task) -> Access:
        """Note the start of a task, and return an object for its reads and writes."""
        return Access(self.values, task.start if task.end >= 0 else next(self._ticks))

    def end(self, task: Task, access: Access) -> None:
        """Write what a task computed.

        Raises:
            Clash: while it ran, another task changed data that it used, or used data that it changed.
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
