"""A transport that records its exchanges: their number, bytes and durations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from moesched.seams import Transport
from moesched.testing.wrapping_transport import Call, WrappingTransport

T = TypeVar("T")


class Record(NamedTuple):
    """A recorded call.

    Attributes:
        seconds: from the call to its return, waiting for others included.
        failed: whether it raised.
    """

    call: Call
    seconds: float
    failed: bool


class RecordingTransport(WrappingTransport):
    """Records every call of a transport.

    Attributes:
        records: one per call, in the order of their ends.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.records: list[Record] = []
        self._adding = threading.Lock()

    @property
    def calls(self) -> int:
        """The number of calls that ended."""
        return len(self.records)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that ranks passed in."""
        return sum(record.call.nbytes for record in self.records)

    @property
    def seconds(self) -> float:
        """Total seconds of all calls."""
        return sum(record.seconds for record in self.records)

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Run and record a call."""
        began = time.perf_counter()
        failed = True
        try:
            value = run()
            failed = False
            return value
        finally:
            record = Record(call, time.perf_counter() - began, failed)
            with self._adding:
                self.records.append(record)
