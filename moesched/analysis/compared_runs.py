"""Reads the figures of one run, predicted or measured, from its trace or its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from moesched.analysis.replayed_run import replay_recording
from moesched.errors import BadInput
from moesched.system.decoding import decode_json
from moesched.system.input_file import given_path
from moesched.system.plain_text import plain_text
from moesched.tasks import Phase
from moesched.trace.chrome_reader import MOST_BYTES, Trace, read_bytes, read_trace
from moesched.trace.recording import About, Recording, phase_of
from moesched.trace.summary import KindUse, summarize

Section = Literal["total", "request", "lane", "kind", "memory"]
Unit = Literal["s", "share", "tokens/s", "requests/s", "tasks", "bytes", "GB/s", "GFLOP/s"]


class Measure(msgspec.Struct, frozen=True):
    """Key of a figure in a comparison: section, name (such as a lane's title), quantity (`what`), and unit."""

    section: Section
    name: str
    what: str
    unit: Unit


THROUGHPUT = Measure("total", "throughput", "rate", "tokens/s")
"""All generated tokens over the run's time without loading."""
TO_FIRST_TOKEN = "to the first token"
BETWEEN_TOKENS = "between tokens"
"""Names of two latencies, in figures about requests that arrive over time."""
REMEDY = "name a file that --trace or --report of a run or a simulation wrote"


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run to compare, with its figures.

    Attributes:
        figures: whether the figures are predicted or measured.
        values: the figures, each by its `Measure`.
        trace: the trace of the run; None if there is only a report.
        replayed: whether this is a replay of recorded durations, whose figures do not follow from the machine's rates.
        costs_measured: for a prediction, whether it rests on costs that `moesched calibrate` measured.
    """

    title: str
    figures: Literal["predicted", "measured"]
    policy: str = ""
    model: str = ""
    machine: str = ""
    values: dict[Measure, float]
    trace: Trace | None = None
    replayed: bool = False
    costs_measured: bool = False


def read_run(path: Path | str) -> ComparedRun:
    """Read the figures of a run from its trace or report.

    Raises:
        BadInput: the file is neither a trace nor a report.
    """
    path = given_path(path, "a run")
    data = read_bytes(path, REMEDY)
    where = f"{path} is not a JSON object"
    content = decode_json(data, dict[str, msgspec.Raw], where, REMEDY, most=MOST_BYTES)
    title = plain_text(path.name)
    if "traceEvents" in content:
        recording, about = read_trace(path)
        return run_of_recording(title, recording, about)
    where = f"{path} is not the report of a run"
    if "ttft" in content:
        return _run_of_service(title, decode_json(data, _ServiceReport, where, REMEDY, most=MOST_BYTES))
    if not content.keys().isdisjoint(("ranking", "ways")):
        raise BadInput(
            f"{path} is what `moesched plan` found, and not the report of a run: compare the reports of "
            "`moesched simulate --report`, one for each policy"
        )
    if "lanes" not in content:
        raise BadInput(f"{path} is neither the trace nor the report of a run: {REMEDY}")
    return _run_of_report(title, decode_json(data, _Report, where, REMEDY, most=MOST_BYTES))


def run_of_recording(title: str, recording: Recording, about: About) -> ComparedRun:
    """Compute a run's figures from its recording; `about` names its policy, model and machine."""
    summary = summarize(recording)
    seconds: dict[Phase | None, list[float]] = {None: [], "prefill": [], "decode": []}
    for step in summary.steps:
        seconds[phase_of(step.step)].append(step.seconds)
    load, prefill = (next(iter(seconds[phase]), None) for phase in (None, "prefill"))
    decode = seconds["decode"][1:] if recording.trimmed else seconds["decode"]
    if recording.requests:  # steps have prompts of some requests, tokens of others, and waits for the next
        prefill, decode = None, []
    whole = (
        summary.steps[-1].end - recording.start / 1e9 if summary.steps else 0.0
    )  # without what ended after it
    values = _totals(load, prefill, fmean(decode) if decode else None, whole)
    if about.tokens_per_second:
        values[THROUGHPUT] = about.tokens_per_second
    values[Measure("total", "run", "tasks", "tasks")] = summary.tasks
    values[Measure("total", "run", "moved", "bytes")] = summary.nbytes_moved
    for name, lane in zip(recording.titles.values(), summary.lanes, strict=True):
        values |= _lane(name, lane.busy_seconds, lane.utilization)
    values |= _kinds(summary.kinds)
    values |= _memories(summary.peak_bytes)
    return ComparedRun(
        title=title,
        figures=about.figures,
        policy=about.policy,
        model=about.model,
        machine=about.machine,
        values=values,
        trace=Trace(recording, about),
        costs_measured=about.costs_measured,
    )


def replayed_run(run: ComparedRun) -> ComparedRun:
    """Replay a run's tasks on the virtual clock, in recorded order and durations, with new start times.

    Raises:
        BadInput: the run has no trace, or its trace cannot be replayed.
    """
    recording, about = trace_of(run, "--replayed replays")
    again = msgspec.structs.replace(about, driver="virtual")
    replay = run_of_recording(f"{run.title} replayed", replay_recording(recording), again)
    if THROUGHPUT in replay.values:
        replay.values[THROUGHPUT] *= _running(run) / _running(replay)
    return msgspec.structs.replace(replay, replayed=True)


def _running(run: ComparedRun) -> float:
    """Return the seconds that a run took after loading; if it has a trace, those that the trace covers."""
    loading = run.values.get(Measure("total", "load", "time", "s"), 0.0)
    return run.values[Measure("total", "run", "time", "s")] - loading


def trace_of(run: ComparedRun, what: str) -> Trace:
    """Return the trace of a run.

    Args:
        what: the option that needs the trace, followed by a verb, such as "--trace shows", for the error message.

    Raises:
        BadInput: the run was read from a report.
    """
    if run.trace is None:
        raise BadInput(f"{run.title} is a report, and {what} traces: name what --trace wrote of the run")
    return run.trace


class _ReportLane(msgspec.Struct):
    busy_seconds: float
    utilization: float


class _Report(msgspec.Struct, kw_only=True):
    """The compared fields of the JSON report of a run.

    Without `measured`, a report counts as measured if it has `tokens`, and else as predicted.
    """

    lanes: dict[str, _ReportLane]
    measured: bool | None = None
    costs_measured: bool = False
    tokens: Any = None
    policy: str = ""
    model: str = ""
    machine: str = ""
    load_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_step_seconds: float | None = None
    step_seconds: list[float] = []
    simulated_seconds: float | None = None
    decode_tokens_per_second: float | None = None
    throughput_tokens_per_second: float | None = None
    kinds: list[KindUse] = []
    peak_bytes: dict[str, int] = {}


def _run_of_report(title: str, report: _Report) -> ComparedRun:
    measured = report.tokens is not None if report.measured is None else report.measured
    whole = report.simulated_seconds
    if report.load_seconds is not None and report.step_seconds:
        whole = report.load_seconds + sum(report.step_seconds)
    values = _totals(report.load_seconds, report.prefill_seconds, report.decode_step_seconds, whole)
    rates = {
        Measure("total", "decode", "rate", "tokens/s"): report.decode_tokens_per_second,
        THROUGHPUT: report.throughput_tokens_per_second,
    }
    values |= {measure: rate for measure, rate in rates.items() if rate is not None}
    for name, lane in report.lanes.items():
        values |= _lane(name, lane.busy_seconds, lane.utilization)
    values |= _kinds(report.kinds)
    values |= _memories(report.peak_bytes)
    return ComparedRun(
        title=title,
        figures="measured" if measured else "predicted",
        policy=report.policy,
        model=report.model,
        machine=report.machine,
        values=values,
        costs_measured=report.costs_measured,
    )


class _Percentiles(msgspec.Struct):
    p50: float
    p90: float
    p99: float


class _ServiceReport(msgspec.Struct, kw_only=True):
    """The compared fields of the JSON report of a run whose requests arrive over time."""

    seconds: float
    requests_per_second: float
    tokens_per_second: float
    ttft: _Percentiles | None
    tpot: _Percentiles | None = None
    pause: _Percentiles | None = None
    waited: _Percentiles | None = None
    kept: float | None = None
    goodput: float | None = None
    measured: bool = False
    policy: str = ""
    model: str = ""
    machine: str = ""


def _run_of_service(title: str, report: _ServiceReport) -> ComparedRun:
    values = _totals(None, None, None, report.seconds)
    values[THROUGHPUT] = report.tokens_per_second
    values[Measure("total", "requests", "rate", "requests/s")] = report.requests_per_second
    if report.kept is not None and report.goodput is not None:
        values[Measure("total", "objectives", "kept", "share")] = report.kept
        values[Measure("total", "objectives", "goodput", "requests/s")] = report.goodput
    times = {
        "to a place": report.waited,
        TO_FIRST_TOKEN: report.ttft,
        BETWEEN_TOKENS: report.tpot,
        "between tokens, longest": report.pause,
    }
    for name, found in times.items():
        for what in found.__struct_fields__ if found is not None else ():
            values[Measure("request", name, what, "s")] = getattr(found, what)
    return ComparedRun(
        title=title,
        figures="measured" if report.measured else "predicted",
        policy=report.policy,
        model=report.model,
        machine=report.machine,
        values=values,
    )


def _totals(
    load: float | None, prefill: float | None, decode_step: float | None, whole: float | None
) -> dict[Measure, float]:
    named = {"load": load, "prefill": prefill, "decode step": decode_step, "run": whole}
    return {Measure("total", name, "time", "s"): value for name, value in named.items() if value is not None}


def _lane(name: str, busy_seconds: float, utilization: float) -> dict[Measure, float]:
    return {
        Measure("lane", name, "busy", "s"): busy_seconds,
        Measure("lane", name, "use", "share"): utilization,
    }


def _kinds(kinds: Sequence[KindUse]) -> dict[Measure, float]:
    values: dict[Measure, float] = {}
    for each in kinds:
        name = f"{each.kind} on {each.lane}"
        values[Measure("kind", name, "time", "s")] = each.seconds
        values[Measure("kind", name, "tasks", "tasks")] = each.tasks
        if each.nbytes:
            values[Measure("kind", name, "moved", "bytes")] = each.nbytes
            values[Measure("kind", name, "rate", "GB/s")] = each.gigabytes_per_second
        if each.flops:
            values[Measure("kind", name, "rate", "GFLOP/s")] = each.gigaflops_per_second
    return values


def _memories(peak_bytes: dict[str, int]) -> dict[Measure, float]:
    return {Measure("memory", name, "peak", "bytes"): peak for name, peak in peak_bytes.items()}
