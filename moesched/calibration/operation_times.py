"""Times single operations: passes over memory, copies, products and reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from moesched.calibration.extent import CODED, OperationExtent
from moesched.calibration.task_times import point
from moesched.calibration.timing import Call, Step, measure, measure_after_pause
from moesched.errors import BadInput
from moesched.machines import CostPoint
from moesched.machines.calibrated import RESUME
from moesched.machines.product_times import PRODUCT, RESIDENT_PRODUCT
from moesched.models.config import DType
from moesched.models.stored_formats import STORED_FORMATS
from moesched.models.tensor_sizes import COLUMNS
from moesched.units import format_bytes

DISK = "disk->host"
READ, STREAM = "read", "stream"
DTYPES: tuple[DType, ...] = ("bfloat16", "float32")
LINEAR = "float32"
"""Dtype in which the time of a product with coded weights is linear in its rows, so that few rows suffice."""
FEW_ROWS = 8
READ_PAUSE = 0.003
"""Seconds between a read and the next one when the disk was idle: about the time of a layer without its fetches."""
PAUSED_READ, COMPUTED = 1 << 20, 1 << 20
"""Bytes of a read after a pause, and of memory that is read again and again during the pause."""
SCRATCH_BLOCK = 16 << 20


class DeviceProbe(Protocol):
    """Interface of a device whose operations are timed. A `Call` is a function that runs one operation.

    `read` returns the call that reads a part of a file, `stream` one that reads memory once, and `copy` one that copies
    memory. `product` returns a function that, given a number of rows, returns the call of a product with these rows.
    `ready` returns a context in which calls are made. `packs` tells whether the device rearranges (packs) resident
    weights of a dtype for its kernels.
    """

    def ready(self) -> AbstractContextManager[object]: ...
    def packs(self, dtype: str) -> bool: ...
    def product(
        self, dtype: str, outputs: int, inputs: int, *, stored: str = "", packed: bool = False
    ) -> Callable[[int], Call]: ...
    def read(self, path: Path, nbytes: int, pieces: int) -> Call: ...
    def stream(self, nbytes: int) -> Call: ...
    def copy(self, nbytes: int) -> Call: ...
    def close(self) -> None: ...


class TimedOperation(NamedTuple):
    """Key of a timed operation; the fields are explained in `CostPoint`."""

    name: str
    size: float
    dtype: str = ""
    format: str = ""
    rows: float = 1


class OperationTimes:
    """Measured times of single operations.

    Args:
        probe: the device whose operations are timed.
        scratch: path of a file to write and to time reads from.
        extent: the operations, and the number of rounds.
    """

    def __init__(self, probe: DeviceProbe, scratch: Path, extent: OperationExtent) -> None:
        self._probe = probe
        self._scratch = scratch
        self._extent = extent
        self._times: dict[TimedOperation, list[float]] = {}

    def write_scratch(self) -> None:
        """Write the scratch file through to the disk.

        Raises:
            BadInput: the disk has too little room.
        """
        folder, size = self._scratch.parent, self._extent.scratch
        room = shutil.disk_usage(folder).free
        if room < 2 * size:
            raise BadInput(
                f"{folder.parent} has room for {format_bytes(room)}, but calibration needs "
                f"{format_bytes(2 * size)} for a while: free some, or set MOESCHED_CACHE to a folder on another disk"
            )
        block = os.urandom(SCRATCH_BLOCK)
        with self._scratch.open("wb") as file:
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def steps(self) -> Iterator[Step]:
        """Yield the measurements of one round as steps; each step returns a function that records the times."""
        yield self._memory
        yield self._reads
        for dtype, matrices in self._extent.matrices.items():
            for matrix in matrices:
                yield partial(self._products, dtype, matrix)
                if self._probe.packs(dtype):
                    yield partial(self._products, dtype, matrix, packed=True)
                for stored in CODED if dtype == LINEAR else (*CODED, COLUMNS):
                    yield partial(self._products, dtype, matrix, stored)

    def points(self) -> list[CostPoint]:
        """Return a point of the cost table for each operation, with the operation's median seconds over rounds."""
        return [
            replace(point(each.name, each.dtype, each.rows, each.size, median(times)), format=each.format)
            for each, times in sorted(self._times.items())
        ]

    def speeds(self, name: str) -> list[float]:
        """Return the speeds of an operation, one for each size and round, relative to the median speed at this size.

        Args:
            name: the operation's name, as in `CostPoint.operation`.
        """
        return [
            median(times) / seconds
            for operation, times in self._times.items()
            if operation.name == name
            for seconds in times
        ]

    def _memory(self) -> Call:
        nbytes = self._extent.stream
        streamed = self._measure(TimedOperation(STREAM, nbytes), self._probe.stream(nbytes))
        copied = [
            self._measure(TimedOperation("copy", size), self._probe.copy(size))
            for size in self._extent.copies
        ]
        return partial(self._record_times, [streamed, *copied])

    def _reads(self) -> Call:
        found = [
            self._measure(
                TimedOperation(READ, nbytes, rows=pieces), self._probe.read(self._scratch, nbytes, pieces)
            )
            for nbytes in self._extent.reads
            for pieces in self._extent.pieces
        ]
        return partial(self._record_times, [*found, self._resumed()])

    def _resumed(self) -> tuple[TimedOperation, float]:
        """Time reads after pauses in which the processor computes, as it does between the fetches of a policy."""
        read = self._probe.read(self._scratch, PAUSED_READ, 1)
        compute = self._probe.stream(COMPUTED)
        with self._probe.ready():
            longer = measure_after_pause(read, compute, READ_PAUSE, self._extent.pauses)
        return TimedOperation(f"{RESUME}{DISK}", 0), max(0.0, longer)

    def _products(
        self, dtype: str, matrix: tuple[int, int], stored: str = "", *, packed: bool = False
    ) -> Call:
        outputs, inputs = matrix
        with self._probe.ready():
            of_rows = self._probe.product(dtype, outputs, inputs, stored=stored, packed=packed)
        rows = self._extent.rows
        if stored and dtype == LINEAR:
            rows = tuple(count for count in rows if count <= FEW_ROWS)
        product = TimedOperation(
            RESIDENT_PRODUCT if packed else PRODUCT,
            outputs * STORED_FORMATS[dtype if stored in ("", COLUMNS) else stored].row_bytes(inputs),
            dtype,
            stored,
        )
        found = [self._measure(product._replace(rows=count), of_rows(count)) for count in rows]
        return partial(self._record_times, found)

    def _measure(self, operation: TimedOperation, call: Call) -> tuple[TimedOperation, float]:
        with self._probe.ready():
            return operation, measure(call, self._extent.seconds)

    def _record_times(self, found: Iterable[tuple[TimedOperation, float]]) -> None:
        for operation, seconds in found:
            self._times.setdefault(operation, []).append(seconds)
