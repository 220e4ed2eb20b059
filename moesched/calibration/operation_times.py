"""Operations timed by themselves: memory, copies, products and reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

from moesched.calibration.extent import OperationExtent
from moesched.calibration.task_times import point
from moesched.calibration.timing import Call, Step, measure
from moesched.errors import BadInput
from moesched.machines import CostPoint
from moesched.models.config import ITEM_BYTES, DType
from moesched.units import format_bytes

DISK = "disk->host"
READ, STREAM = "read", "stream"
PRODUCT, RESIDENT_PRODUCT = "product", "resident product"
DTYPES: tuple[DType, ...] = ("bfloat16", "float32")
SCRATCH_BLOCK = 16 << 20


class DeviceProbe(Protocol):
    """A device's operations, ready to be timed."""

    def ready(self) -> AbstractContextManager[object]: ...
    def packs(self, dtype: str) -> bool: ...
    def product(self, dtype: str, outputs: int, inputs: int, *, packed: bool) -> Callable[[int], Call]: ...
    def read(self, path: Path, nbytes: int, pieces: int) -> Call: ...
    def stream(self, nbytes: int) -> Call: ...
    def copy(self, nbytes: int) -> Call: ...
    def close(self) -> None: ...


class Operation(NamedTuple):
    """Key of a timed operation: its name, dtype, rows and size."""

    name: str
    dtype: str
    rows: float
    size: float


class OperationTimes:
    """Measured times of single operations.

    Args:
        scratch: path of a file to write and to time reads from.
    """

    def __init__(self, probe: DeviceProbe, scratch: Path, extent: OperationExtent) -> None:
        self._probe = probe
        self._scratch = scratch
        self._extent = extent
        self._times: dict[Operation, list[float]] = {}

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
                f"{format_bytes(2 * size)} for a while: free some, or choose another --out"
            )
        block = os.urandom(SCRATCH_BLOCK)
        with self._scratch.open("wb") as file:
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def steps(self) -> Iterator[Step]:
        """Yield the measurements of one round."""
        yield self._memory
        yield self._reads
        for dtype in DTYPES:
            for matrix in self._extent.matrices:
                yield partial(self._products, dtype, matrix, packed=False)
                if self._probe.packs(dtype):
                    yield partial(self._products, dtype, matrix, packed=True)

    def points(self) -> list[CostPoint]:
        """Return a point of the cost table for each operation: its median over rounds."""
        return [point(*operation, median(times)) for operation, times in sorted(self._times.items())]

    def speeds(self, name: str) -> list[float]:
        """Return the speeds of an operation in all rounds and sizes, relative to the median of the same size."""
        return [
            median(times) / seconds
            for operation, times in self._times.items()
            if operation.name == name
            for seconds in times
        ]

    def _memory(self) -> Call:
        nbytes = self._extent.stream
        streamed = self._measure(STREAM, nbytes, self._probe.stream(nbytes))
        copied = [self._measure("copy", size, self._probe.copy(size)) for size in self._extent.copies]
        return partial(self._record_times, [streamed, *copied])

    def _reads(self) -> Call:
        found = [
            self._measure(READ, nbytes, self._probe.read(self._scratch, nbytes, pieces), rows=pieces)
            for nbytes in self._extent.reads
            for pieces in self._extent.pieces
        ]
        return partial(self._record_times, found)

    def _products(self, dtype: str, matrix: tuple[int, int], *, packed: bool) -> Call:
        outputs, inputs = matrix
        with self._probe.ready():
            of_rows = self._probe.product(dtype, outputs, inputs, packed=packed)
        nbytes = outputs * inputs * ITEM_BYTES[dtype]
        name = RESIDENT_PRODUCT if packed else PRODUCT
        found = [self._measure(name, nbytes, of_rows(rows), dtype, rows) for rows in self._extent.rows]
        return partial(self._record_times, found)

    def _measure(
        self, name: str, size: float, call: Call, dtype: str = "", rows: float = 1
    ) -> tuple[Operation, float]:
        with self._probe.ready():
            return Operation(name, dtype, rows, size), measure(call, self._extent.seconds)

    def _record_times(self, found: Iterable[tuple[Operation, float]]) -> None:
        for operation, seconds in found:
            self._times.setdefault(operation, []).append(seconds)
