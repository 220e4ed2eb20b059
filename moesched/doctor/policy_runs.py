"""Runs a tiny model under every policy, and checks that tokens and logits agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from moesched import plugins
from moesched.doctor.findings import Finding
from moesched.doctor.tiny_model import MICRO_BATCH, NEW_TOKENS, PROMPTS
from moesched.errors import BadInput
from moesched.jobs.report import JobReport
from moesched.jobs.session import run_model
from moesched.runs.listeners import Listener
from moesched.seams import Device, is_expert_parallel
from moesched.trace import check_trace

FIRST = "resident"
"""The policy that all others are compared with: it moves no weights, and runs everywhere."""
TRACED = "cgopipe"
TIGHT = 0.7
"""Share of the memory that `resident` takes; the other policies get only this share, so that they stream weights."""
REPORT = "send the file of --out as an issue: it is a fault of moesched, of the library, or of the hardware"

Logits = dict[tuple[int, ...], list[np.ndarray[Any, Any]]]
"""Logits by the sequences of a micro-batch: for each step an array of shape (sequences, vocabulary)."""


@runtime_checkable
class KeepsLogits(Protocol):
    """A device that keeps the logits of each step.

    Attributes:
        logits: a pair for each step of a micro-batch: the indices of its sequences, and logits of shape
            (sequences, vocabulary).
    """

    logits: list[tuple[tuple[int, ...], np.ndarray[Any, Any]]]


class PolicyRun(NamedTuple):
    """The report and the logits of one policy's run."""

    report: JobReport
    logits: Logits


class PolicyRuns(NamedTuple):
    """Results of running all policies.

    Attributes:
        runs: the finished runs, by policy.
        refused: the reason why this machine cannot run a policy, by policy.
        failed: the error with which a policy's run failed, by policy.
        trace_problems: faults found in the trace of one policy's run.
    """

    runs: dict[str, PolicyRun]
    refused: dict[str, str]
    failed: dict[str, str]
    trace_problems: list[str]


class _Keeper(Listener):
    """Listener that keeps the run's device, which holds the logits."""

    def __init__(self) -> None:
        self.device: object = None

    def opened(self, device: Device) -> None:
        self.device = device

    def logits(self) -> Logits:
        found: Logits = {}
        if isinstance(self.device, KeepsLogits):
            for sequences, logits_SV in self.device.logits:
                found.setdefault(sequences, []).append(np.asarray(logits_SV).astype(np.float32))
        return found


def policy_names() -> list[str]:
    """Return the names of policies that run on one machine, `resident` first."""
    names = [
        name for name in plugins.shipped_policies() if not is_expert_parallel(plugins.find("policies", name))
    ]
    return [FIRST, *(name for name in [*names, "adversarial"] if name != FIRST)]


def run_policies(
    model: Path, device: str, scratch: Path, progress: Callable[[float, float, str], object]
) -> PolicyRuns:
    """Run a model under every policy, most of them with too little memory to keep all weights in it.

    The policy `resident` runs first, without a budget. Each other policy gets a budget that is smaller than the peak of
    `resident`. If its plan does not fit this budget, it runs without one.

    Args:
        device: name of a device of `moesched list devices`.
        scratch: an existing folder for the trace of one run.
        progress: called with (policies done, all policies, name of the running one).
    """
    names, found = policy_names(), PolicyRuns({}, {}, {}, [])
    budgets: dict[str, int] = {}
    for number, name in enumerate(names):
        progress(number, len(names), f"running {name}")
        trace = scratch / "trace.json" if name == TRACED else None
        try:
            found.runs[name] = _run(model, device, name, budgets, trace)
        except BadInput as error:
            found.refused[name] = str(error)
            continue
        except Exception as error:  # reported in one line: a policy's failure must not hide the others
            found.failed[name] = f"{type(error).__name__}: {error}"
            continue
        if name == FIRST:
            budgets = _tight(found.runs[name].report)
        if trace is not None:
            found.trace_problems.extend(check_trace(trace))
    return found


def _tight(report: JobReport) -> dict[str, int]:
    """Return a budget {memory: bytes} for the memory with a run's highest peak: `TIGHT` times this peak."""
    memory = max(report.peak_bytes, key=lambda name: report.peak_bytes[name])
    return {memory: int(TIGHT * report.peak_bytes[memory])}


def _run(model: Path, device: str, name: str, budgets: dict[str, int], trace: Path | None) -> PolicyRun:
    """Run the policy `name` on a device within budgets, or without budgets if its plan does not fit them.

    Args:
        budgets: limits in bytes, by memory.
        trace: the file for a trace; None for no trace.
    """
    try:
        return _run_within(model, device, name, budgets, trace)
    except BadInput:
        if not budgets:
            raise
        return _run_within(model, device, name, {}, trace)


def _run_within(
    model: Path, device: str, name: str, budgets: Mapping[str, int], trace: Path | None
) -> PolicyRun:
    keeper = _Keeper()
    report = generate(
        model,
        device,
        policy=name,
        device_settings={"keep_logits": True},
        budgets=dict(budgets),
        trace=trace,
        listener=keeper,
    )
    return PolicyRun(report, keeper.logits())


def generate(model: Path, device: str, **options: Any) -> JobReport:
    """Run a tiny model with the fixed prompts `PROMPTS` on a device, and return the report.

    Args:
        options: further options of `run_model`.
    """
    return run_model(
        model,
        PROMPTS,
        device=device,
        batch_size=len(PROMPTS),
        micro_batch_size=MICRO_BATCH,
        max_new_tokens=NEW_TOKENS,
        foreign_machine=True,
        **options,
    )


def judge_runs(found: PolicyRuns, *, one_processor: bool, expected: list[list[int]]) -> Iterator[Finding]:
    """Yield findings on whether all policies ran and agree in tokens and logits.

    Args:
        one_processor: whether one processor, CPU or GPU, ran all kernels, so that logits must be equal to the bit.
        expected: the tokens that the CPU generates, by request.
    """
    for name, reason in found.failed.items():
        yield Finding(about=f"policy {name}", says=f"failed: {reason}", remedy=REPORT)
    first = found.runs.get(FIRST)
    if first is None:
        reason = found.refused.get(FIRST, "")
        if reason:
            yield Finding(
                about=f"policy {FIRST}", says=f"is refused: {reason}", remedy="mend what the line names"
            )
        return
    yield from _other_tokens(found, expected)
    yield _agreement(found, first, one_processor)
    streamed = sum(run.report.plan.streamed_pages > 0 for run in found.runs.values())
    refused = f"; refused on this machine: {', '.join(found.refused)}" if found.refused else ""
    yield Finding(about="policies", says=f"{len(found.runs)} ran, {streamed} of them streamed{refused}")
    yield _of_trace(found.trace_problems)


def _other_tokens(found: PolicyRuns, expected: list[list[int]]) -> Iterator[Finding]:
    for name, run in found.runs.items():
        if run.report.failure is not None:
            yield Finding(about=f"policy {name}", says=f"ended early: {run.report.failure}", remedy=REPORT)
        elif run.report.tokens != expected:
            yield Finding(
                about=f"policy {name}", says="gives other tokens than resident on the CPU", remedy=REPORT
            )


def _agreement(found: PolicyRuns, first: PolicyRun, one_processor: bool) -> Finding:
    """Return the finding on the largest difference of logits between `first` and the other policies' runs.

    Args:
        one_processor: whether one processor, CPU or GPU, ran all kernels, so that no difference is allowed.
    """
    apart = {name: largest_difference(run.logits, first.logits) for name, run in found.runs.items()}
    different = {name: by for name, by in apart.items() if by > 0}
    if not first.logits:
        return Finding(about="bits", says="this device does not keep logits; tokens were compared")
    if not different:
        return Finding(about="bits", says=f"the logits of {len(apart)} policies are equal to the bit")
    worst = max(different, key=lambda name: different[name])
    says = f"the logits of {', '.join(different)} differ, of {worst} by up to {different[worst]:.2g}"
    if one_processor:
        return Finding(about="bits", says=says, remedy=REPORT)
    return Finding(about="bits", says=f"{says}, as kernels of CPU and GPU may")


def largest_difference(some: Logits, others: Logits) -> float:
    """Return the largest absolute difference between the logits of two runs.

    The result is infinite if the runs have different sequences, or if a logit is not finite.
    """
    if some.keys() != others.keys():
        return float("inf")
    largest = 0.0
    for sequences, steps in some.items():
        if len(steps) != len(others[sequences]):
            return float("inf")
        for one_SV, other_SV in zip(steps, others[sequences], strict=True):
            by = float(np.abs(one_SV.astype(np.float64) - other_SV).max())
            largest = max(largest, by if np.isfinite(by) else float("inf"))
    return largest


def _of_trace(problems: list[str]) -> Finding:
    if problems:
        return Finding(about="trace", says=f"is faulty: {problems[0]}", remedy=REPORT)
    return Finding(about="trace", says=f"of {TRACED} is complete and consistent")
