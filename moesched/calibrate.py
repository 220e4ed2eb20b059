"""Calibration: measures this machine into a machine file with a table of what operations cost.

It sees no model, policy or budget of anybody's: the matrices, and the two small models that it runs, have sizes of
their own. What the device does in a task is timed as a whole, for weights that stay and for weights that were
fetched, over rows and over sizes; first one task after the other, then beside what may run at the same time: reads,
attention on the host, experts on both lanes.

Everything is measured in several rounds, and the fastest round counts: what else runs on the machine for a while makes
operations slower, never faster.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple, Protocol

import msgspec

from moesched import plugins
from moesched.errors import BadInput
from moesched.exercise import Gym, Manner, small_model
from moesched.machines import Contention, CostPoint, Machine
from moesched.machines.local import available_memory, calibrated_file, unified_machine, usable_cores
from moesched.machines.toml_text import machine_toml
from moesched.models.config import ITEM_BYTES, DType, ModelConfig
from moesched.models.random_model import write_random_model
from moesched.task_times import TaskTimes, point, rounded
from moesched.units import format_bytes

Call = Callable[[], object]
Progress = Callable[[int, int], object]

DISK = "disk->host"
DTYPES: tuple[DType, ...] = ("bfloat16", "float32")


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured.

    Attributes:
        rounds: of what is timed by itself.
        seconds: for each point of it, in each round.
        rows, matrices: of products: rows, and (outputs, inputs).
        copies, reads, stream, scratch: bytes.
        models: the small models, smaller first; a cost is interpolated between them.
        groups: prompt lengths of the micro-batches that they are run with.
        longest: more of them, for the smaller model only.
        long: the micro-batches, by their places in `groups`, that the host attends for.
        steps, turns: of a run, and how many runs; fewer in float32, which takes longer.
        turns_together: runs of the larger model in each manner in which tasks overlap.
    """

    rounds: int = 3
    seconds: float = 0.025
    rows: tuple[int, ...] = (1, 8, 64, 256)
    matrices: tuple[tuple[int, int], ...] = ((640, 1536), (1920, 2560))
    copies: tuple[int, ...] = (1 << 14, 1 << 20, 1 << 24)
    reads: tuple[int, ...] = tuple(1 << power for power in (16, 18, 20, 22, 24, 26))
    stream: int = 256 << 20
    scratch: int = 512 << 20
    models: tuple[ModelConfig, ModelConfig] = (
        small_model("calibration-small", hidden=640, intermediate=896, heads=8, vocabulary=6144),
        small_model("calibration-large", hidden=1280, intermediate=2304, heads=16, vocabulary=13_312),
    )
    groups: tuple[tuple[int, ...], ...] = (
        (5,),
        (5,) * 3,
        (5,) * 8,
        (5,) * 24,
        (5,) * 80,
        tuple(range(6, 22)),
        (250, 251),
    )
    longest: tuple[tuple[int, ...], ...] = ((1500,),)
    long: tuple[int, ...] = (5, 6)
    steps: int = 9
    steps_float32: int = 5
    turns: int = 4
    turns_float32: int = 2
    turns_together: int = 2


FULL = Extent()


class Probe(Protocol):
    """What gives operations of a device to be timed."""

    def ready(self) -> AbstractContextManager[object]: ...
    def packs(self, dtype: str) -> bool: ...
    def product(self, dtype: str, outputs: int, inputs: int, *, packed: bool) -> Callable[[int], Call]: ...
    def read(self, path: Path, nbytes: int) -> Call: ...
    def stream(self, nbytes: int) -> Call: ...
    def copy(self, nbytes: int) -> Call: ...


def calibrate(out: Path | None = None, progress: Progress | None = None, extent: Extent = FULL) -> Machine:
    """Measure this machine, in about a minute, and write its file.

    Args:
        out: where to; by default the place where `--machine auto` finds it.
        progress: told of (steps done, steps in all).
        extent: how much is measured.

    Raises:
        BadInput: the file cannot be written, or the disk has no room for what is read from it.
    """
    target = calibrated_file() if out is None else out
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".calibrate-") as folder:
            machine = _Calibration(Path(folder), extent).run(progress or (lambda done, total: None))
        unfinished = target.with_name(f".{target.name}.partial")
        unfinished.write_text(machine_toml(machine))
        unfinished.replace(target)
    except OSError as error:
        raise BadInput(f"cannot calibrate into {target}: {error.strerror}: choose another --out") from error
    return machine


class _What(NamedTuple):
    """An operation that is timed by itself."""

    operation: str
    dtype: str
    rows: float
    size: float


class _Calibration:
    """What was measured so far.

    Args:
        folder: on the disk that is measured; what is written there may be deleted afterwards.
    """

    def __init__(self, folder: Path, extent: Extent) -> None:
        self.extent = extent
        self.folder = folder
        self.scratch = folder / "scratch"
        self.probe: Probe = plugins.find("devices", "moesched.devices.torch_probe:TorchProbe")(usable_cores())
        self.times: dict[_What, list[float]] = {}
        self.tasks = TaskTimes()
        self.rates: dict[tuple[str, str], list[float]] = {}

    def run(self, progress: Progress) -> Machine:
        """Measure all, in steps of a second or two."""
        steps = list(self._steps())
        for done, step in enumerate(steps):
            progress(done, len(steps))
            step()
        progress(len(steps), len(steps))
        return self._machine()

    def _steps(self) -> Iterable[Call]:
        yield self._write
        for _ in range(self.extent.rounds):
            yield self._memory
            yield self._reads
            for dtype in DTYPES:
                for matrix in self.extent.matrices:
                    yield partial(self._products, dtype, matrix, packed=False)
                    if self.probe.packs(dtype):
                        yield partial(self._products, dtype, matrix, packed=True)
        extent = self.extent
        for dtype in DTYPES:
            for turn in range(extent.turns if dtype == "bfloat16" else extent.turns_float32):
                for size in range(len(extent.models)):
                    yield partial(self._serial, size, dtype, turn)
        for _ in range(self.extent.turns_together):
            for manner in (Manner.READING, Manner.ATTENDING, Manner.SHARING):
                yield partial(self._together, manner)

    # -- operations by themselves ------------------------------------------------------------------

    def _measure(self, operation: str, size: float, call: Call, dtype: str = "", rows: float = 1) -> None:
        with self.probe.ready():
            self.times.setdefault(_What(operation, dtype, rows, size), []).append(
                measure(call, self.extent.seconds)
            )

    def _memory(self) -> None:
        self._measure("stream", self.extent.stream, self.probe.stream(self.extent.stream))
        for size in self.extent.copies:
            self._measure("copy", size, self.probe.copy(size))

    def _products(self, dtype: str, matrix: tuple[int, int], *, packed: bool) -> None:
        outputs, inputs = matrix
        with self.probe.ready():
            of_rows = self.probe.product(dtype, outputs, inputs, packed=packed)
        nbytes = outputs * inputs * ITEM_BYTES[dtype]
        for rows in self.extent.rows:
            self._measure("kept product" if packed else "product", nbytes, of_rows(rows), dtype, rows)

    def _write(self) -> None:
        """A file to read from, whose bytes are really on the disk."""
        room = shutil.disk_usage(self.folder).free
        if room < 2 * self.extent.scratch:
            raise BadInput(
                f"{self.folder.parent} has room for {format_bytes(room)}, but calibration needs "
                f"{format_bytes(2 * self.extent.scratch)} for a while: free some, or choose another --out"
            )
        block = os.urandom(16 << 20)
        with self.scratch.open("wb") as file:
            for _ in range(self.extent.scratch // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def _reads(self) -> None:
        for nbytes in self.extent.reads:
            self._measure(DISK, nbytes, self.probe.read(self.scratch, nbytes))

    # -- tasks of small models ---------------------------------------------------------------------

    def _gym(self, size: int, dtype: DType) -> Gym:
        path = self.folder / self.extent.models[size].name
        if not path.exists():
            write_random_model(self.extent.models[size], path)
        return Gym(
            path,
            dtype,
            self.extent.groups if size else self.extent.groups + self.extent.longest,
            self.extent.long,
        )

    def _serial(self, size: int, dtype: DType, turn: int) -> None:
        steps = self.extent.steps if dtype == "bfloat16" else self.extent.steps_float32
        tasks = self._gym(size, dtype).run(self._machine(), Manner.SERIAL, turn, steps)
        self.tasks.add(self.extent.models[size], dtype, tasks)

    def _together(self, manner: Manner) -> None:
        """How much tasks of the larger model slow each other down."""
        dtype = DTYPES[0]
        tasks = self._gym(-1, dtype).run(self._machine(), manner, 0, self.extent.steps)
        for pair, rate in self.tasks.rates(self.extent.models[-1], dtype, tasks).items():
            self.rates.setdefault(pair, []).append(rate)
        if manner is not Manner.SHARING:
            self.tasks.add_gaps(tasks)

    # -- the outcome -------------------------------------------------------------------------------

    def _machine(self) -> Machine:
        operations = [point(*what, min(times)) for what, times in sorted(self.times.items())]
        contention = [
            Contention(work=sort, beside=other, rate=rounded(median(rates)))
            for (sort, other), rates in sorted(self.rates.items())
        ]
        machine = unified_machine(
            platform.node() or "local",
            memory=available_memory(),
            disk=shutil.disk_usage(self.folder).total,
            flops={dtype: _best_flops(operations, dtype) for dtype in DTYPES},
            memory_bandwidth=_best_bandwidth(operations, "stream"),
            disk_bandwidth=_best_bandwidth(operations, DISK),
            description=f"calibrated: {_processor()}, {usable_cores()} cores, torch {version('torch')}",
        )
        table = operations + self.tasks.points()
        return msgspec.structs.replace(machine, cost_table=table, contention=contention)


def measure(call: Call, seconds: float, least: int = 5) -> float:
    """The median time of a call, after one that does not count: of at least that many calls and seconds."""
    call()
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < least or perf_counter() < end:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)


def _best_bandwidth(table: Sequence[CostPoint], operation: str) -> float:
    return rounded(max(point.size / point.seconds for point in table if point.operation == operation))


def _best_flops(table: Sequence[CostPoint], dtype: str) -> float:
    rates = [
        2.0 * point.rows * point.size / ITEM_BYTES[dtype] / point.seconds
        for point in table
        if point.operation in ("product", "kept product") and point.dtype == dtype
    ]
    return rounded(max(rates))


def _processor() -> str:
    """What the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
