"""Runs small random models, and times their tasks alone and beside others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from moesched import plugins
from moesched.calibration.exercise import Exercise, FinishedTasks, Mode
from moesched.calibration.extent import CalibrationExtent
from moesched.calibration.operation_times import DISK
from moesched.calibration.task_times import RunKey, TaskTimes
from moesched.calibration.timing import Call, Step
from moesched.machines import ATTENTION, ATTENTION_CALLS, FEW_ROWS, MANY_ROWS, Machine
from moesched.machines.local import assumed_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import DType
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.requests.batch import Batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.seams import Device, Policy
from moesched.system.signals import signals_held
from moesched.tasks import Task

MakeDevice = Callable[[Checkpoint, WeightLayout], Device]


class ModelRuns:
    """Runs of small models, from which times of tasks, and speeds of tasks beside each other, are collected.

    Args:
        folder: folder to write the models to.
        extent: the models, the prompts and the numbers of runs.
    """

    def __init__(self, folder: Path, extent: CalibrationExtent) -> None:
        self.tasks = TaskTimes()
        self.rates: dict[tuple[str, str], list[float]] = {}
        self._folder = folder
        self._extent = extent

    def steps(self, turn: int) -> Iterator[Step]:
        """Yield the runs of one round as steps: each runs a model, and returns a function that records the times.

        Args:
            turn: number of the round, from 0.
        """
        for dtype, runs in self._extent.runs.items():
            for batch in range(len(self._extent.batches)):
                for model in runs.models:
                    key = RunKey(model, dtype, batch)
                    if turn < runs.resident:
                        yield partial(self._resident, key, turn)
                    if turn < runs.serial:
                        yield partial(self._serial, key, turn)
                    if turn < runs.fresh:
                        yield partial(self._fresh, key, turn)
                    if turn < runs.together:
                        yield partial(self._together, key, Mode.STREAMING)
                if turn < runs.together:
                    for mode in (Mode.ATTENDING, Mode.SHARING):
                        yield partial(self._together, RunKey(runs.models[-1], dtype, batch), mode)

    def _resident(self, key: RunKey, turn: int) -> Call:
        return partial(self.tasks.add_resident, key, self._run(key, Mode.RESIDENT, turn))

    def _serial(self, key: RunKey, turn: int) -> Call:
        return partial(self.tasks.add, key, self._run(key, Mode.SERIAL, turn))

    def _fresh(self, key: RunKey, turn: int) -> Call:
        return partial(self.tasks.add_fresh, key, self._run(key, Mode.FRESH, turn))

    def _together(self, key: RunKey, mode: Mode) -> Call:
        return partial(self._record_rates, key, mode, self._run(key, mode, 0))

    def _record_rates(self, key: RunKey, mode: Mode, tasks: Sequence[Task]) -> None:
        if mode is not Mode.SHARING:
            self.tasks.add_gaps(tasks)
        for pair, rate in self.tasks.rates(key, tasks, fresh=mode is Mode.STREAMING).items():
            if _counts(mode, *pair):
                self.rates.setdefault(pair, []).append(rate)

    def _run(self, key: RunKey, mode: Mode, turn: int) -> list[Task]:
        model, dtype, batch = key
        runs, prompts = self._extent.runs[dtype], self._extent.batches[batch]
        checkpoint = self._folder / model.name
        if not checkpoint.exists():
            write_random_model(model, checkpoint)
        groups = prompts.groups + (prompts.long if model is runs.models[0] else ())
        policy = Exercise(mode, turn, prompts.host_attended)
        return run_exercise(checkpoint, dtype, policy, groups, runs.steps)


def run_exercise(
    checkpoint: Path,
    dtype: DType,
    policy: Policy,
    groups: Sequence[Sequence[int]],
    steps: int,
    make_device: MakeDevice | None = None,
    machine: Machine | None = None,
) -> list[Task]:
    """Run a model in a dtype on this machine, and return its tasks in the order of their ends.

    The same tokens are generated in every run, so that tasks can be compared between runs.

    Args:
        groups: prompt lengths of each micro-batch.
        steps: number of steps, prefill included.
        make_device: makes the device from a checkpoint and its layout; by default the device torch.
        machine: machine that the device runs on; by default this machine without a GPU.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the run before all tasks were done.
    """
    with signals_held():  # a Ctrl-C during garbage collection would be lost
        gc.collect()  # frees the previous run's weights
    opened = open_checkpoint(checkpoint)
    layout = weight_layout(opened.config, dtype)
    device = (make_device or plugins.find("devices", "torch"))(opened, layout)
    lengths = tuple(length for group in groups for length in group)
    numbers = iter(range(len(lengths)))
    batch = Batch(lengths, steps, tuple(tuple(next(numbers) for _ in group) for group in groups))
    prompts = [
        [(31 * request + 17 * index * index) % opened.config.vocabulary for index in range(length)]
        for request, length in enumerate(lengths)
    ]
    finished = FinishedTasks()
    plan = plan_run(machine or assumed_machine(), layout, batch, policy, slot_bytes=device.slot_bytes)
    if run(plan, policy, device, prompts, observers=[finished]).interrupted:
        raise KeyboardInterrupt
    return finished.tasks


def _counts(mode: Mode, work_class: str, beside: str) -> bool:
    """Test whether runs in a mode (see `Mode`) are used to measure the speed of a class of work beside other classes.

    Runs in ATTENDING mode are not used for products beside reads from the disk. Runs in STREAMING mode are: there, a
    product has just waited for its weights, and reads then slow it most. Runs in SHARING mode are used neither for
    attention nor for work beside attention, as little runs beside attention there.
    """
    if mode is Mode.ATTENDING:
        return not (work_class in (FEW_ROWS, MANY_ROWS) and beside == DISK)
    attention_runs_beside_little = mode is Mode.SHARING
    return not (
        attention_runs_beside_little and {ATTENTION, ATTENTION_CALLS} & {work_class, *beside.split(" + ")}
    )
