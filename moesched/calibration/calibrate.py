"""Calibration: measures this machine into a machine file with a table of what operations cost.

It sees no model, policy or budget of anybody's: the matrices, and the two small models that it runs, have sizes of
their own. What the device does in a task is timed as a whole, for weights that stay and for weights that were
fetched, over rows and over sizes; first one task after the other, then beside what may run at the same time: reads,
attention on the host, experts on both lanes. Streams, copies, products and reads are measured by themselves and pair by
pair, too.

Everything is measured in several rounds, and the median of the rounds counts, as it does where runs are compared with
their prediction. Rounds during which other processes were busy are done again, as often as the extent allows.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple, Protocol

import msgspec

from moesched import plugins
from moesched.calibration.contention import LEAST_RATE
from moesched.calibration.exercise import Gym, Manner, small_model
from moesched.calibration.other_load import OtherLoad
from moesched.calibration.task_times import TaskTimes, point, rounded
from moesched.errors import BadInput
from moesched.machines import ATTENTION, ATTENTION_CALLS, Contention, CostPoint, Machine
from moesched.machines.cost import Surface
from moesched.machines.local import (
    available_memory,
    calibrated_file,
    this_processor,
    unified_machine,
    usable_cores,
)
from moesched.machines.toml_text import machine_toml
from moesched.models.config import ITEM_BYTES, DType, ModelConfig
from moesched.models.random_model import write_random_model
from moesched.tasks import Task
from moesched.units import format_bytes

Call = Callable[[], object]
Step = Callable[[], Call]
"""Measures something, and returns what takes it in."""
Progress = Callable[[int, int], object]

READ, DISK = "read", "disk->host"
DTYPES: tuple[DType, ...] = ("bfloat16", "float32")
MOST_OTHER_CORES = 0.1
"""What others may keep busy meanwhile."""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured.

    Attributes:
        rounds: of what is timed by itself.
        seconds: for each point of it, in each round.
        rows, matrices: of products: rows, and (outputs, inputs).
        copies, reads, stream, scratch: bytes.
        pieces: of reads at once, as a transfer of several pages.
        models: the small models, smaller first; a cost is interpolated between them.
        between: one more for float32, whose products change from one core to all of them between those two.
        groups: prompt lengths of the micro-batches that they are run with.
        longest: more of them, for the smaller model only.
        long: the micro-batches, by their places in `groups`, that the host attends for.
        steps, turns: of a run, and how many runs; fewer in float32, which takes longer.
        turns_fresh: runs with weights that were fetched just before.
        turns_together: runs of the larger model in each manner in which tasks overlap.
        again: how many rounds may be done again because others were busy.
    """

    rounds: int = 3
    seconds: float = 0.025
    rows: tuple[int, ...] = (1, 8, 64, 256)
    matrices: tuple[tuple[int, int], ...] = ((640, 1536), (1920, 2560))
    copies: tuple[int, ...] = (1 << 14, 1 << 20, 1 << 24)
    reads: tuple[int, ...] = tuple(1 << power for power in (16, 18, 20, 22, 24, 25))
    pieces: tuple[int, ...] = (1, 2, 8)
    stream: int = 256 << 20
    scratch: int = 512 << 20
    models: tuple[ModelConfig, ModelConfig] = (
        small_model("calibration-small", hidden=640, intermediate=896, heads=8, vocabulary=6144),
        small_model("calibration-large", hidden=1280, intermediate=2304, heads=16, vocabulary=24_576),
    )
    between: tuple[ModelConfig, ...] = (
        small_model("calibration-middle", hidden=1024, intermediate=2048, heads=16, vocabulary=12_288),
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
    long: tuple[int, ...] = (2, 3, 5, 6)
    steps: int = 9
    steps_float32: int = 5
    turns: int = 4
    turns_float32: int = 2
    turns_fresh: int = 2
    turns_together: int = 4
    again: int = 12


FULL = Extent()


class Others(Protocol):
    """Watches how much others do."""

    def cores(self) -> float: ...


class DeviceProbe(Protocol):
    """What gives operations of a device to be timed."""

    def ready(self) -> AbstractContextManager[object]: ...
    def packs(self, dtype: str) -> bool: ...
    def product(self, dtype: str, outputs: int, inputs: int, *, packed: bool) -> Callable[[int], Call]: ...
    def read(self, path: Path, nbytes: int, pieces: int) -> Call: ...
    def stream(self, nbytes: int) -> Call: ...
    def copy(self, nbytes: int) -> Call: ...
    def close(self) -> None: ...


def calibrate(out: Path | None = None, progress: Progress | None = None, extent: Extent = FULL) -> Machine:
    """Measure this machine, in three or four minutes, and write its file; cut short, it leaves the old one.

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
            with closing(_Calibration(Path(folder), extent)) as calibration:
                machine = calibration.run(progress or (lambda done, total: None))
            whole = Path(folder) / "machine.toml"
            whole.write_text(machine_toml(machine))
            whole.replace(target)
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
        self.probe: DeviceProbe = plugins.find("devices", "moesched.devices.torch.probe:TorchProbe")(
            usable_cores()
        )
        self.times: dict[_What, list[float]] = {}
        self.tasks = TaskTimes()
        self.rates: dict[tuple[str, str], list[float]] = {}
        self.again = extent.again
        self.most_of_others = 0.0

    def close(self) -> None:
        """Let go of files and threads."""
        self.probe.close()

    def run(self, progress: Progress) -> Machine:
        """Measure all, in steps of a few seconds."""
        steps = list(self._steps())
        progress(0, len(steps))
        self._write()
        for done, step in enumerate(steps, start=1):
            cores, self.again = undisturbed(step, self.again)
            self.most_of_others = max(self.most_of_others, cores)
            progress(done, len(steps))
        return self._machine()

    def _steps(self) -> Iterable[Step]:
        """All in turn, as the machine's speed drifts: the median is that of the whole time."""
        extent = self.extent
        for turn in range(max(extent.rounds, extent.turns)):
            if turn < extent.rounds:
                yield from self._by_themselves()
            if turn < extent.turns:
                yield from self._runs(turn)

    def _by_themselves(self) -> Iterable[Step]:
        yield self._memory
        yield self._reads
        yield self._pairs
        for dtype in DTYPES:
            for matrix in self.extent.matrices:
                yield partial(self._products, dtype, matrix, packed=False)
                if self.probe.packs(dtype):
                    yield partial(self._products, dtype, matrix, packed=True)

    def _runs(self, turn: int) -> Iterable[Step]:
        """Runs of the small models."""
        extent = self.extent
        for model in self._models("bfloat16"):
            yield partial(self._serial, model, "bfloat16", turn)
        if turn < extent.turns_fresh:
            for dtype in DTYPES:
                for model in self._models(dtype):
                    yield partial(self._fresh, model, dtype, turn)
        if turn < extent.turns_together:
            for manner in (Manner.READING, Manner.ATTENDING, Manner.SHARING):
                yield partial(self._together, manner)
        if turn < extent.turns_float32:
            for model in self._models("float32"):
                yield partial(self._serial, model, "float32", turn)

    # -- operations by themselves ------------------------------------------------------------------

    def _measure(
        self, operation: str, size: float, call: Call, dtype: str = "", rows: float = 1
    ) -> tuple[_What, float]:
        with self.probe.ready():
            return _What(operation, dtype, rows, size), measure(call, self.extent.seconds)

    def _take_times(self, found: Iterable[tuple[_What, float]]) -> None:
        for what, seconds in found:
            self.times.setdefault(what, []).append(seconds)

    def _memory(self) -> Call:
        nbytes = self.extent.stream
        streamed = self._measure("stream", nbytes, self.probe.stream(nbytes))
        copied = [self._measure("copy", size, self.probe.copy(size)) for size in self.extent.copies]
        return partial(self._take_times, [streamed, *copied])

    def _products(self, dtype: str, matrix: tuple[int, int], *, packed: bool) -> Call:
        outputs, inputs = matrix
        with self.probe.ready():
            of_rows = self.probe.product(dtype, outputs, inputs, packed=packed)
        nbytes = outputs * inputs * ITEM_BYTES[dtype]
        name = "kept product" if packed else "product"
        found = [self._measure(name, nbytes, of_rows(rows), dtype, rows) for rows in self.extent.rows]
        return partial(self._take_times, found)

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

    def _reads(self) -> Call:
        found = [
            self._measure(READ, nbytes, self.probe.read(self.scratch, nbytes, pieces), rows=pieces)
            for nbytes in self.extent.reads
            for pieces in self.extent.pieces
        ]
        return partial(self._take_times, found)

    def _pairs(self) -> Call:
        """How operations that are no whole tasks slow each other down."""
        extent, dtype = self.extent, DTYPES[0]
        with self.probe.ready():
            of_rows = self.probe.product(dtype, *extent.matrices[-1], packed=False)
            calls = {
                "stream": self.probe.stream(extent.stream),
                "copy": self.probe.copy(extent.copies[-1]),
                "gemv": of_rows(1),
                "gemm": of_rows(extent.rows[-1]),
                READ: self.probe.read(self.scratch, extent.reads[-1], 1),
            }
        found = {
            (name, beside): self._speed_beside(calls[name], calls[beside])
            for name, beside in permutations(calls, 2)
        }
        return partial(self._take_pairs, found)

    def _speed_beside(self, call: Call, other: Call) -> float:
        with self.probe.ready():
            return speed_beside(call, partial(self._within_ready, other), self.extent.seconds)

    def _within_ready(self, call: Call) -> None:
        with self.probe.ready():
            call()

    def _take_pairs(self, found: Mapping[tuple[str, str], float]) -> None:
        for pair, rate in found.items():
            self.rates.setdefault(pair, []).append(rate)

    # -- tasks of small models ---------------------------------------------------------------------

    def _models(self, dtype: DType) -> tuple[ModelConfig, ...]:
        return self.extent.models if dtype == "bfloat16" else self.extent.models + self.extent.between

    def _gym(self, model: ModelConfig, dtype: DType) -> Gym:
        path = self.folder / model.name
        if not path.exists():
            write_random_model(model, path)
        groups = self.extent.groups
        if model is self.extent.models[0]:
            groups += self.extent.longest
        return Gym(path, dtype, groups, self.extent.long)

    def _serial(self, model: ModelConfig, dtype: DType, turn: int) -> Call:
        tasks = self._gym(model, dtype).run(self._machine(), Manner.SERIAL, turn, self._steps_in(dtype))
        return partial(self.tasks.add, model, dtype, tasks)

    def _fresh(self, model: ModelConfig, dtype: DType, turn: int) -> Call:
        tasks = self._gym(model, dtype).run(self._machine(), Manner.FRESH, turn, self._steps_in(dtype))
        return partial(self.tasks.add_fresh, model, dtype, tasks)

    def _steps_in(self, dtype: DType) -> int:
        return self.extent.steps if dtype == "bfloat16" else self.extent.steps_float32

    def _together(self, manner: Manner) -> Call:
        """How much tasks of the larger model slow each other down."""
        tasks = self._gym(self.extent.models[-1], DTYPES[0]).run(
            self._machine(), manner, 0, self.extent.steps
        )
        return partial(self._take_rates, manner, tasks)

    def _take_rates(self, manner: Manner, tasks: Sequence[Task]) -> None:
        rates = self.tasks.rates(self.extent.models[-1], DTYPES[0], tasks)
        if manner is Manner.SHARING:  # attention is the accelerator's there, and beside little
            rates = {pair: rate for pair, rate in rates.items() if not any(map(_has_attention, pair))}
        else:
            self.tasks.add_gaps(tasks)
        self._take_pairs(rates)

    # -- the outcome -------------------------------------------------------------------------------

    def _machine(self) -> Machine:
        operations = [point(*what, median(times)) for what, times in sorted(self.times.items())]
        operations += self._transfers([each for each in operations if each.operation == READ])
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
            description=f"calibrated: {this_processor()}, torch {version('torch')}; "
            f"others kept up to {self.most_of_others:.1f} cores busy",
        )
        table = operations + self.tasks.points()
        return msgspec.structs.replace(
            machine, measured_on=this_processor(), cost_table=table, contention=contention
        )

    def _transfers(self, reads: Sequence[CostPoint]) -> list[CostPoint]:
        """What pages take from the disk: reads by themselves, and as much longer as tasks took than such reads."""
        longer = self.tasks.longer_than(DISK, Surface(reads))
        return [point(DISK, "", each.rows, each.size, longer * each.seconds) for each in reads]


def undisturbed(step: Step, again: int, watch: Callable[[], Others] = OtherLoad) -> tuple[float, int]:
    """Take in what a step finds while others do little, or what it finds the last time.

    Args:
        again: how often it may be done again.
        watch: begins to watch the others.

    Returns:
        The cores that others kept busy meanwhile, and how often steps may still be done again.
    """
    while True:
        others = watch()
        take_in = step()
        cores = others.cores()
        if cores <= MOST_OTHER_CORES or not again:
            take_in()
            return cores, again
        again -= 1


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


def speed_beside(call: Call, other: Call, seconds: float) -> float:
    """How fast a call is while another thread repeats a second one, relative to being alone; at most 1."""
    alone = measure(call, seconds)
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            other()

    thread = threading.Thread(target=repeat, name="beside")
    thread.start()
    try:
        together = measure(call, seconds)
    finally:
        ended.set()
        thread.join()
    return max(LEAST_RATE, min(1.0, alone / together))


def _has_attention(sorts: str) -> bool:
    return not {ATTENTION, ATTENTION_CALLS}.isdisjoint(sorts.split(" + "))


def _best_bandwidth(table: Sequence[CostPoint], operation: str) -> float:
    rates = [each.rows * each.size / each.seconds for each in table if each.operation == operation]
    return rounded(max(rates))


def _best_flops(table: Sequence[CostPoint], dtype: str) -> float:
    rates = [
        2.0 * point.rows * point.size / ITEM_BYTES[dtype] / point.seconds
        for point in table
        if point.operation in ("product", "kept product") and point.dtype == dtype
    ]
    return rounded(max(rates))
