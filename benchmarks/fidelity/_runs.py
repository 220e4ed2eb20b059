"""Runs of a setting's policies on this machine, with their replays and predictions."""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.fidelity._settings import SETTINGS, Case, Setting
from benchmarks.fidelity._slow_t4 import slow_t4
from benchmarks.peers import families
from benchmarks.shared.core_rate import core_gflops
from benchmarks.shared.decoding import Model
from benchmarks.shared.disk_rate import disk_rate
from benchmarks.shared.memory_rate import memory_gbs
from moesched import plugins
from moesched.analysis.replayed_run import replay_recording, without_loading
from moesched.machines import Machine
from moesched.machines.local import local_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.planner.uncertainty import Figures, uncertainty
from moesched.requests.batch import split_batch
from moesched.routing.observed import ObservedRouting
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.seams import Observer, Policy
from moesched.steps.plan import Plan
from moesched.tasks import Task
from moesched.trace import Recorder, Recording

EMULATED = "moesched.devices.emulated.device:EmulatedDevice"
LANE = "lane "
"""Before the name of a lane, in a run's figures."""


class BusyLanes:
    """An observer of the seconds that each lane is busy in decode steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def ended(self, task: Task) -> None:
        """Add a task's time."""
        if task.phase == "decode":
            self.seconds[f"{LANE}{task.lane.name}"] += (task.end - task.start) / 1e9


class Bench:
    """One setting: its model, the machine that it runs on, its requests."""

    def __init__(self, name: str, folder: Path) -> None:
        self.setting = setting = SETTINGS[name]
        self.emulated = name.startswith("emulated")
        self.machine = slow_t4() if self.emulated else local_machine()
        self.checkpoint: Checkpoint = open_checkpoint(_written(setting, folder))
        self.layout: WeightLayout = weight_layout(self.checkpoint.config, setting.dtype)
        chance = random.Random(1)
        self.prompts = [
            [chance.randrange(setting.config.vocabulary) for _ in range(chance.randrange(*setting.prompts))]
            for _ in range(max(setting.batch_sizes))
        ]
        self._routing: dict[Case, ObservedRouting] = {}

    def plan(self, case: Case, device: Any, machine: Machine) -> tuple[Plan, Policy]:
        """A policy made anew, and its plan.

        Raises:
            BadInput: the plan does not fit.
        """
        weights = self.layout.globals_bytes + sum(map(device.slot_bytes, self.layout.pages))
        batch = split_batch(
            [len(prompt) for prompt in self.prompts[: case.batch_size]],
            self.setting.new_tokens,
            self.setting.micro_batch_size,
        )
        policy = plugins.make_policy(case.policy)
        budgets = {machine.accelerator.memory: int(case.share * weights)}
        return plan_run(machine, self.layout, batch, policy, budgets, device.slot_bytes), policy

    def device(self) -> Any:
        """Made anew; the run closes it."""
        gc.collect()  # what the run before left, weights and all, in cycles
        name = EMULATED if self.emulated else "torch"
        return plugins.find("devices", name)(self.checkpoint, self.layout)

    @contextmanager
    def rates(self) -> Iterator[dict[str, Callable[[], float]]]:
        """By name, functions that measure the rates that times depend on; empty for an emulated machine."""
        if self.emulated:
            yield {}
            return
        with disk_rate(Model(self.checkpoint, self.layout)) as disk:
            yield {"memory_gbs": memory_gbs, "disk_gbs": disk.gbs, "core_gflops": core_gflops}

    def measure(self, case: Case) -> dict[str, float]:
        """One run and its replay, in seconds.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the run.
        """
        device = self.device()
        plan, policy = self.plan(case, device, self.machine)
        recorder, lanes = Recorder(), BusyLanes()
        observers: list[Observer] = [lanes]
        if self.setting.observed:
            self._routing[case] = ObservedRouting(self.setting.new_tokens)
            observers.append(self._routing[case])
        prompts = self.prompts[: case.batch_size]
        report = run(plan, policy, device, prompts, recorder=recorder, observers=observers)
        if report.interrupted:
            raise KeyboardInterrupt
        recording = without_loading(recorder.recording())
        return {
            **times(report.step_seconds),
            **lanes.seconds,
            "recorded": (recording.end - recording.start) / 1e9,
            "replayed": _seconds_of(replay_recording(recording, handovers=True)),
            "replayed bare": replay_recording(recording).end / 1e9,
            "wall": report.wall_seconds,
        }

    def predict(self, case: Case, machine: Machine) -> dict[str, float]:
        """The run on the virtual clock, in seconds; with the band of the decode steps, but not by a run's choices."""
        device, lanes = self.device(), BusyLanes()
        report = simulate(
            *self.plan(case, device, machine), observers=[lanes], routing=self._routing.get(case)
        )
        found = {**times(report.step_seconds), **lanes.seconds}
        if not self.emulated and not self.setting.observed:
            steps = report.step_seconds[1:]
            expected = Figures(report.throughput_tokens_per_second, mean(steps), report.prefill_seconds)
            band = uncertainty(lambda: [Rank(*self.plan(case, device, machine))], expected).band
            low, _, high = band["decode_step_seconds"]
            found |= {"low": low * len(steps), "high": high * len(steps)}
        return found


def _written(setting: Setting, folder: Path) -> Path:
    """The setting's model: one of published widths in the cache folder, others in this one."""
    if setting.published:
        return families.written(setting.published)
    return write_random_model(setting.config, folder / setting.config.name, dtype=setting.dtype)


def _seconds_of(recording: Recording) -> float:
    """From the first task's start to the last one's end."""
    return (recording.end - min(each.start for each in recording.slices)) / 1e9


def times(step_seconds: Sequence[float]) -> dict[str, float]:
    """Seconds to rank by."""
    return {"decode": sum(step_seconds[1:]), "total": sum(step_seconds)}
