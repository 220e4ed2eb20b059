"""Calibration: measures this machine and writes a machine file with a table of costs.

Users give no model, policy or budget: matrices and small models of fixed sizes are run. Each task is timed as
a whole, for resident and for fetched weights, over several numbers of rows and sizes: first one task after the other,
then beside other tasks that may run at the same time, such as reads, attention on the host, or experts on both
processors. Passes over memory, copies, matrix products and reads are also timed by themselves.

Everything is measured in several rounds, and the median counts. Measurements that other processes disturbed are
repeated, up to a limit. A quick calibration measures bfloat16 only, and scales costs in float32 from the costs in
bfloat16.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from moesched import plugins
from moesched.calibration.extent import QUICK, THOROUGH, CalibrationExtent
from moesched.calibration.model_runs import ModelRuns
from moesched.calibration.operation_times import (
    DISK,
    DTYPES,
    READ,
    STREAM,
    DeviceProbe,
    OperationTimes,
)
from moesched.calibration.scaling import scaled_points
from moesched.calibration.spread import spread
from moesched.calibration.task_times import point, rounded
from moesched.calibration.timing import Step, undisturbed
from moesched.errors import BadInput, attach_report
from moesched.keywords import takes
from moesched.machines import COST_FORMAT, Contention, CostPoint, Machine
from moesched.machines.local import calibrated_file, this_processor, unified_machine
from moesched.machines.product_times import PRODUCT, RESIDENT_PRODUCT
from moesched.machines.surfaces import Surface
from moesched.machines.toml_text import machine_toml
from moesched.models.config import ITEM_BYTES
from moesched.options import Option, Options
from moesched.system.cache import cache_folder
from moesched.system.cells import counted_in_cell
from moesched.system.cores import usable_cores
from moesched.system.memory import available_memory
from moesched.system.own_loop import interruptible
from moesched.system.scratch import scratch_folder
from moesched.system.whole_file import require_writable, whole_file

Progress = Callable[[int, int], object]

PROBE = "moesched.devices.torch.probe:TorchProbe"


class CalibrationOptions(Options):
    """The options of `calibrate_machine`."""

    out: Annotated[
        Path | str | None, Option("The file to write; by default the one that `--machine auto` reads.")
    ] = field(default=None, kw_only=False)
    progress: Annotated[Progress | None, Option("Called with (steps done, steps in all).")] = field(
        default=None, kw_only=False
    )
    thorough: Annotated[
        bool,
        Option(
            "Whether to measure for three to seven minutes instead of half a minute. A quick calibration scales costs "
            "in float32 from those in bfloat16, and measures fewer points."
        ),
    ] = False


@takes(CalibrationOptions)
@interruptible()
def calibrate_machine(given: CalibrationOptions) -> Machine:
    """Measure this machine and write its machine file. A calibration that is cut short leaves the old file.

    Raises:
        BadInput: the machine file cannot be written, or the disk has no room for the scratch file of timed reads.
    """
    file = None if given.out is None else Path(given.out)
    extent = THOROUGH if given.thorough else QUICK
    return calibrate_into(file, extent, given.progress or counted_in_cell("calibrating"))


def calibrate_into(file: Path | None, extent: CalibrationExtent, progress: Progress | None = None) -> Machine:
    """Measure this machine and write its machine file; returns the measured machine.

    Args:
        file: the file to write; by default the one that `--machine auto` reads.
        extent: the operations and models to measure, and the number of rounds.
        progress: called with (steps done, steps in all).
    """

    def measured(folder: Path) -> Machine:
        with closing(Calibration(folder, extent)) as calibration:
            return calibration.run(progress or (lambda done, total: None))

    return written_to(file, "", measured)


def written_to(file: Path | None, device: str, measure: Callable[[Path], Machine]) -> Machine:
    """Call `measure`, write the machine that it returns to a file, and return that machine.

    Args:
        file: the file to write; by default the one that `--machine auto` reads.
        device: name of the GPU's device, such as "cuda"; empty without a GPU.
        measure: a function from a folder for temporary files to the measured machine. The folder is removed in the end;
            it is in moesched's cache folder, since the system's own folder for temporary files may be in memory.

    Raises:
        BadInput: the file, or the folder and its files, cannot be written. If writing fails only after `measure` has
            returned, the error's attribute `report` is the measured machine.
    """
    if file is None:
        file = calibrated_file(device)
        file.parent.mkdir(parents=True, exist_ok=True)
    require_writable(file, "machine file")
    with scratch_folder(inside=cache_folder()) as folder:
        try:
            machine = measure(folder)
        except OSError as error:
            raise BadInput(
                f"cannot calibrate in {folder}: {error.strerror}: set MOESCHED_CACHE to a folder on another disk"
            ) from error
    try:
        with whole_file(file, "machine file") as written:
            written.write(machine_toml(machine).encode())
    except BadInput as unwritten:  # the disk filled up meanwhile
        attach_report(unwritten, machine)
        raise
    return machine


class Calibration:
    """One calibration of this machine.

    Args:
        folder: a folder for temporary files; the disk that has this folder is measured.
        extent: the operations and models to measure, and the number of rounds.
    """

    def __init__(self, folder: Path, extent: CalibrationExtent) -> None:
        self._folder = folder
        self._extent = extent
        self._probe: DeviceProbe = plugins.load(PROBE, "the probe")(usable_cores())
        self._operations = OperationTimes(self._probe, folder / "scratch", extent.operations)
        self._models = ModelRuns(folder, extent)
        self._most_of_others = 0.0

    def close(self) -> None:
        """Close scratch files and end threads."""
        self._probe.close()

    def run(self, progress: Progress) -> Machine:
        """Measure everything, in steps of a few seconds; `progress` is called with (steps done, all steps)."""
        steps = list(self._steps())
        progress(0, len(steps))
        self._operations.write_scratch()
        repeats = self._extent.repeats
        for done, step in enumerate(steps, start=1):
            cores, repeats = undisturbed(step, repeats)
            self._most_of_others = max(self._most_of_others, cores)
            progress(done, len(steps))
        return self._machine()

    def _steps(self) -> Iterator[Step]:
        """Yield the steps of all measurements, one round after the other.

        Each operation is thus measured at several times, so that slow changes of the machine's speed enter its median.
        """
        extent = self._extent
        rounds = extent.operations.rounds
        turns = max(
            max(runs.resident, runs.serial, runs.fresh, runs.together) for runs in extent.runs.values()
        )
        for turn in range(max(rounds, turns)):
            if turn < rounds:
                yield from self._operations.steps()
            yield from self._models.steps(turn)

    def _machine(self) -> Machine:
        operations = self._operations.points()
        reads = [each for each in operations if each.operation == READ]
        transfers = self._transfers(reads)
        tasks = self._models.tasks.points()
        scaled = [
            each
            for dtype in DTYPES
            if dtype not in self._extent.runs
            for each in scaled_points(tasks, operations, dtype)
        ]
        measured = [*operations, *transfers, *tasks]
        machine = unified_machine(
            platform.node() or "local",
            memory=available_memory(),
            disk=shutil.disk_usage(self._folder).total,
            flops={dtype: _best_flops(operations, dtype) for dtype in DTYPES},
            memory_bandwidth=_best_bandwidth(operations, STREAM),
            disk_bandwidth=_best_bandwidth(transfers, DISK),
            description=self._description(len(measured), scaled),
        )
        return msgspec.structs.replace(
            machine,
            measured_on=this_processor(),
            cost_format=COST_FORMAT,
            cost_table=measured + scaled,
            contention=contention_of(self._models.rates),
            spread=spread({DISK: self._operations.speeds(READ)} | self._models.tasks.speeds()),
        )

    def _transfers(self, reads: Sequence[CostPoint]) -> list[CostPoint]:
        """Return the costs of page transfers from the disk: times of reads, each scaled to the time of a transfer."""
        longer = self._models.tasks.longer_than(DISK, Surface(reads))
        return [point(DISK, "", each.rows, each.size, longer(each.size) * each.seconds) for each in reads]

    def _description(self, measured: int, scaled: Sequence[CostPoint]) -> str:
        costs = f"{measured} costs measured"
        if scaled:
            costs += f", {len(scaled)} in {scaled[0].dtype} scaled from those in {scaled[0].scaled_from}"
        return (
            f"calibrated {self._extent.name}: {this_processor()}, torch {version('torch')}; {costs}; "
            f"other processes used up to {self._most_of_others:.1f} cores"
        )


def contention_of(rates: Mapping[tuple[str, str], Sequence[float]]) -> list[Contention]:
    """Return the speed of each class of work beside other classes, as entries of a machine file.

    Each entry has the median speed over several runs.

    Args:
        rates: speeds of the slowed work in several runs, relative to running alone. The keys are pairs: the class of
            the slowed work, and the classes that ran beside it, joined by " + ".
    """
    return [
        Contention(work=work_class, beside=other, rate=rounded(median(found)))
        for (work_class, other), found in sorted(rates.items())
    ]


def _best_bandwidth(points: Sequence[CostPoint], operation: str) -> float:
    rates = [each.rows * each.size / each.seconds for each in points if each.operation == operation]
    return rounded(max(rates))


def _best_flops(points: Sequence[CostPoint], dtype: str) -> float:
    rates = [
        2.0 * each.rows * each.size / ITEM_BYTES[dtype] / each.seconds
        for each in points
        if each.operation in (PRODUCT, RESIDENT_PRODUCT) and each.dtype == dtype and not each.format
    ]
    return rounded(max(rates))
