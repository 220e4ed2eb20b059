"""Predicts a measured run: simulates its plans and expert choices on the virtual clock, at a calibration's costs.

Batches are predicted after they ran, so that a prediction disturbs no timing. A prediction uses the run's number of
steps, the experts that routers chose and the accuracy of router previews, but no measured times. The uncertainty band
is simulated for the first batch, and has the same relative width for all batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, linear_regression
from time import perf_counter

from msgspec.structs import replace

from moesched import plugins
from moesched.inputs.defaults import DEVICE, MACHINE, PREVIEW_ACCURACY
from moesched.jobs.bands import with_band
from moesched.jobs.job import Job
from moesched.jobs.options import SessionOptions
from moesched.jobs.report import JobReport, at_the_tokens_of, job_report
from moesched.planner.uncertainty import MOST_STEPS, RunsProgress
from moesched.requests.batch import Batch
from moesched.routing.observed import ObservedRouting
from moesched.runs.batch_policies import BatchPolicies
from moesched.runs.decisions import rows_of_experts, simulated_decisions
from moesched.runs.ending import Ending
from moesched.runs.generation import TokenHandling
from moesched.runs.listeners import KindMeter
from moesched.runs.outcome import LaneUse, PreviewUse, make_report
from moesched.runs.ranks import Devices, Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.seams import IsCalibrated
from moesched.system.cores import divided_cores, usable_cores
from moesched.system.signals import hold_signals, release_signals
from moesched.tasks import Task

MOST_TASKS = 40_000
"""Largest number of tasks that are simulated, which takes less than a second; further steps are extrapolated."""

MOST_TASKS_OF_A_BAND = 10_000
"""Largest number of tasks in a simulation for an uncertainty band, which takes about twenty simulations."""

LEAST_STEPS = 8
LEAST_TASKS_OF_A_LAYER = 3

CALIBRATED = (DEVICE, "cuda")
"""Names of the devices that `moesched calibrate` measures."""

SEVERAL = "a calibration measures one device, and this run used several"


class Expectation:
    """Predicts, by simulation after the run, the report of a batch that ran on a device, to compare the two reports.

    Args:
        obstacle: the reason why the batch cannot be predicted; None if it can.
        policies: makes the policy of each simulated batch; a policy with state continues from the batch before.

    Attributes:
        observers: observers to pass to the measured run.
    """

    def __init__(self, job: Job, batch: Batch, obstacle: str | None, policies: BatchPolicies) -> None:
        self._job = job
        self._policies = policies
        self._batch = batch
        self._obstacle = obstacle
        layers = job.layout.config.layers * len(batch.micro_batches)
        self._most_steps = max(LEAST_STEPS, MOST_TASKS // (LEAST_TASKS_OF_A_LAYER * layers))
        self._routing = ObservedRouting(self._most_steps)

    @property
    def observers(self) -> Sequence[ObservedRouting]:
        """Observers to pass to the measured run, which record its routing."""
        return [] if self._obstacle else [self._routing]

    def added_to(self, report: JobReport, estimating: RunsProgress | None) -> JobReport:
        """Return the run's report with its prediction, or with the reason why there is none. No error is raised.

        A signal ends the prediction, and the report then says that the job was interrupted.

        estimating: called with (simulations done, all simulations) for the band; None for no band.
        """
        if self._obstacle:
            return replace(report, no_expectation=self._obstacle)
        if report.interrupted or report.failure:
            return replace(report, no_expectation="the run ended early")
        ending = Ending()
        with ending:
            release_signals()
            report = replace(report, expected=self._predict(report, estimating))
        hold_signals()
        if report.expected is not None:
            return report
        if ending.interrupted:
            return replace(report, interrupted=True, no_expectation="the prediction was interrupted")
        reason = (ending.failure or "").partition("\n")[0]
        return replace(report, no_expectation=f"it cannot be predicted: {reason}")

    def _predict(self, report: JobReport, estimating: RunsProgress | None) -> JobReport:
        started = perf_counter()
        plan, policy = self._job.plan(self._batch, policy=self._policies.next_of(0))
        config, steps = plan.layout.config, len(report.step_seconds)
        simulated = min(steps, self._most_steps, max(LEAST_STEPS, steps * MOST_TASKS // report.tasks))
        kinds, busy = KindMeter(), _BusyBySteps(simulated)
        virtual = VirtualRun(
            [Rank(plan, policy)],
            decisions=simulated_decisions(
                plan, self._routing, _accuracy(report.previews), report.tokens or ()
            ),
            tokens=TokenHandling(config.stop_tokens, rows_apart=self._routing.rows_apart),
            observers=[kinds, busy],
            steps=simulated,
            chosen=rows_of_experts(self._routing),
        )
        virtual.run()
        outcome = virtual.rank_runs[0].outcome()
        made = make_report(plan, policy, outcome, perf_counter() - started, measured=False)
        expected = job_report(made, plan, kinds, policy=report.policy, dtype=report.dtype)
        if simulated < steps:
            expected = _prolonged(expected, busy.seconds, steps)
        expected = at_the_tokens_of(expected, report)
        is_long = report.tasks * MOST_STEPS > MOST_TASKS_OF_A_BAND * steps
        if estimating is None or is_long or self._batch.first_request:
            return expected
        return with_band(expected, self._ranks, estimating)

    def _ranks(self) -> list[Rank]:
        """Return the only rank of a simulation: a new plan of the first batch, and the new policy that made it."""
        return [Rank(*self._job.plan(self._batch))]


def obstacle(given: SessionOptions, job: Job, devices: Devices) -> str | None:
    """Return the reason why a job's runs cannot be predicted; None if device and machine are calibrated."""
    machine = job.machine
    if len(devices.all) > 1:
        return SEVERAL
    device, name = plugins.find("devices", given.device), plugins.name_of("devices", given.device)
    if not issubclass(device, IsCalibrated) or not (machine.cost_table or name in CALIBRATED):
        return f"a calibration measures devices {' and '.join(CALIBRATED)}, and this run used {name}"
    if not machine.cost_table:
        if given.machine == MACHINE:
            command = "moesched calibrate" + ("" if name == DEVICE else f" --device {name}")
            return f"this machine is not calibrated: run `{command}`, which takes half a minute"
        return f"machine {machine.name} has no measured costs: calibrate this machine, and omit --machine"
    if machine.measured_on != (here := device.processors()):
        return f"{machine.name} was measured on {machine.measured_on}, and this is {here}"
    if job.layout.config.coded_formats and not any(point.format for point in machine.cost_table):
        return f"{machine.name} was calibrated without coded weights: run `moesched calibrate` again"
    settings = dict(given.device_settings or {})
    cores = usable_cores()
    if settings.get("threads") == (divided_cores(cores).kernels if devices.core_plan else cores):
        del settings["threads"]
    if settings:
        changed = ", ".join(f"{name}={value}" for name, value in settings.items())
        return f"a calibration measures the device with its own settings, and this run had {changed}"
    return None


def _accuracy(previews: Sequence[PreviewUse]) -> float:
    """Return the accuracy of the run's router previews, one layer ahead; a default if there were none."""
    if not previews:
        return PREVIEW_ACCURACY
    nearest = previews[0]
    return float(nearest.accuracy ** (1 / nearest.ahead))


class _BusyBySteps:
    """Observer that sums the seconds that each lane is busy, by step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.seconds: dict[str, list[float]] = {}

    def ended(self, task: Task) -> None:
        """Add an ended task to its lane and step, unless it belongs to the initial loading."""
        if task.step >= 0:
            by_step = self.seconds.setdefault(task.lane.name, [0.0] * self._steps)
            by_step[task.step] += (task.end - task.start) / 1e9


def _prolonged(report: JobReport, busy: dict[str, list[float]], steps: int) -> JobReport:
    """Extrapolate a prediction of the first steps, and the seconds that lanes were busy in them, to all steps."""
    step_seconds = extrapolated(report.step_seconds, steps)
    running = sum(step_seconds)
    used = {name: sum(extrapolated(seconds, steps)) for name, seconds in busy.items()}
    return replace(
        report,
        step_seconds=step_seconds,
        decode_step_seconds=fmean(step_seconds[1:]),
        between_tokens_seconds=fmean(step_seconds[1:]),
        request_times=None,
        micro_batch_times=[],
        simulated_seconds=report.load_seconds + running,
        lanes={name: LaneUse(used.get(name, 0.0), used.get(name, 0.0) / running) for name in report.lanes},
    )


def extrapolated(known: Sequence[float], steps: int) -> list[float]:
    """Extend the known values of the first steps to all steps, by a straight line through the later half of the values.

    The last known value is left out, and replaced by the line's value: it is not typical, since the last simulated step
    fetches nothing for a next step.

    Args:
        known: value of each of the first steps.
        steps: number of all steps.
    """
    whole = known[:-1]
    half = range(len(whole) // 2, len(whole))
    slope, at_zero = linear_regression(half, whole[half.start :])
    return [*whole, *(max(0.0, at_zero + slope * step) for step in range(len(whole), steps))]
