"""Comparison of runs, predicted or measured, by totals, lanes and kinds of task, from traces or reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from moesched.analysis.difference import Cause, Difference, explain_difference
from moesched.analysis.replayed_run import replay_recording
from moesched.errors import BadInput
from moesched.trace.chrome_reader import Trace, read_bytes, read_trace
from moesched.trace.chrome_writer import TitledRun, write_side_by_side
from moesched.trace.recording import About, Recording
from moesched.trace.summary import KindUse, lane_title, summarize
from moesched.units import format_bytes, format_seconds

MOST_WAITS = 5
"""The most kinds of task that are listed with the waits before them."""

_WITHOUT_KIND = {"tasks": "other tasks", "between tasks": "between tasks", "graph": "order and spread"}

Section = Literal["total", "lane", "kind", "memory"]
Unit = Literal["s", "share", "tokens/s", "tasks", "bytes", "GB/s", "GFLOP/s"]


class Measure(msgspec.Struct, frozen=True):
    """Key of a figure: its section, a name in that section, the quantity, and its unit."""

    section: Section
    name: str
    what: str
    unit: Unit


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A run to compare, with its figures; `trace` is None if there is only a report."""

    title: str
    figures: Literal["predicted", "measured"]
    policy: str = ""
    model: str = ""
    machine: str = ""
    values: dict[Measure, float]
    trace: Trace | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure for all runs; None for runs that lack it.

    Attributes:
        ratios: value of each run divided by that of the first.
        error_percents: difference of each run from the first, in percent of the reference: the measured one if only
            one of the two is predicted, otherwise the first.
    """

    section: Section
    name: str
    what: str
    unit: Unit
    values: list[float | None]
    ratios: list[float | None]
    error_percents: list[float | None]


class Title(msgspec.Struct, frozen=True, kw_only=True):
    """Heading of a column: a run."""

    title: str
    figures: Literal["predicted", "measured"]
    policy: str
    model: str
    machine: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of several runs, relative to the first.

    `difference` explains the gap between two runs; None unless there are two, with traces of both.
    """

    runs: list[Title]
    rows: list[Row]
    difference: Difference | None = None

    def header(self) -> list[str]:
        """Return the columns of `table`."""
        columns = ["", "", *(f"{run.title} ({run.figures})" for run in self.runs)]
        for number in range(1, len(self.runs)):
            letter = chr(ord("A") + number)
            columns += [f"{letter}/A", "error"]
        return columns

    def reasons(self) -> list[str]:
        """Describe the difference in sentences; empty if there is none."""
        difference = self.difference
        if difference is None:
            return []
        first, second = (
            f"{self.runs[place].title} ({self.runs[place].figures})" for place in difference.places
        )
        took, replayed = difference.run_seconds, difference.replayed_seconds
        percent = f" ({100 * difference.seconds / took[0]:+.1f} %)" if took[0] else ""
        lines = [
            f"Without loading, {second} took {format_seconds(took[1])} and {first} {format_seconds(took[0])}: "
            f"{_signed(difference.seconds)}{percent}."
        ]
        if took[1]:
            explained = 100 * replayed[1] / took[1]
            lines.append(
                f"Graph and durations of {second} explain {format_seconds(replayed[1])} of its time ({explained:.2f} %)"
                "; the rest passed between tasks, in dispatching them and in waiting for the host."
            )
        return lines

    def causes(self) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows of the causes of the difference, largest first."""
        difference = self.difference
        assert difference is not None, "there is a difference where there are reasons"
        titles = [self.runs[place].title for place in difference.places]
        header = [
            "",
            "lane",
            "phase",
            "tasks",
            *(f"mean, {title}" for title in titles),
            "part of the gap",
            "share",
        ]
        return header, [_cause(cause) for cause in difference.causes if abs(cause.seconds) >= 5e-10]

    def lane_causes(self) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows of the causes by lane."""
        difference = self.difference
        assert difference is not None, "there is a difference where there are reasons"
        titles = [self.runs[place].title for place in difference.places]
        header = ["lane", *(f"busy, {title}" for title in titles), "part of the gap", "share"]
        rows = [
            [each.lane, *map(format_seconds, each.busy_seconds), _signed(each.seconds), _percent(each.share)]
            for each in difference.lanes
        ]
        return header, rows

    def waits(self) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows of the gaps on the second run's critical path."""
        difference = self.difference
        assert difference is not None, "there is a difference where there are reasons"
        header = ["before", "on lane", "times", "waited"]
        rows = [
            [each.kind, each.lane, f"{each.times:,}", format_seconds(each.seconds)]
            for each in difference.waits[:MOST_WAITS]
        ]
        return header, rows

    def table(self) -> list[list[str]]:
        """Return the rows as formatted text, by section."""
        lines = []
        for row in self.rows:
            cells = [row.name, row.what, *(_text(value, row.unit) for value in row.values)]
            for ratio, error in zip(row.ratios[1:], row.error_percents[1:], strict=True):
                cells += [
                    "–" if ratio is None else f"{ratio:.3f}",
                    "–" if error is None else f"{error:+.1f} %",
                ]
            lines.append(cells)
        return lines


def compare(
    sides: Sequence[Side | Path | str],
    *,
    replayed: bool = False,
    trace: Path | str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Compare runs with the first of them.

    Args:
        sides: runs, or the files of their traces or reports.
        replayed: also compare the first run with a replay of its graph and durations on the virtual clock.
        trace: file to write all runs to as a single trace.
        progress: called with the number of replays done and the total, while the difference is computed.

    Raises:
        BadInput: there are fewer than two runs and no replay, a file is neither a trace nor a report, or a report is
            given where a trace is needed.
    """
    if len(sides) + replayed < 2:
        raise BadInput(f"{len(sides)} run given: name two traces or reports to compare")
    runs = [side if isinstance(side, Side) else read_side(side) for side in sides]
    if replayed:
        runs.insert(1, replayed_side(runs[0]))
    if trace is not None:
        shown = [TitledRun(run.title, *_traced(run, "--trace shows")) for run in runs]
        write_side_by_side(trace, shown)
    measures = dict.fromkeys(measure for run in runs for measure in run.values)
    order = ("total", "lane", "kind", "memory")
    return Comparison(
        runs=[
            Title(
                title=run.title, figures=run.figures, policy=run.policy, model=run.model, machine=run.machine
            )
            for run in runs
        ],
        rows=[
            _row(measure, runs) for measure in sorted(measures, key=lambda each: order.index(each.section))
        ],
        difference=_difference(runs, progress),
    )


def replayed_side(side: Side) -> Side:
    """Replay the graph and durations of a run on the virtual clock, without its start times.

    Raises:
        BadInput: the run has no trace, or its trace cannot be replayed.
    """
    recording, about = _traced(side, "--replayed replays")
    again = msgspec.structs.replace(about, driver="virtual")
    return side_of_recording(f"{side.title} replayed", replay_recording(recording), again)


def _traced(side: Side, what: str) -> Trace:
    if side.trace is None:
        raise BadInput(f"{side.title} is a report, and {what} traces: name what --trace wrote of the run")
    return side.trace


def _difference(runs: Sequence[Side], progress: Callable[[int, int], object] | None) -> Difference | None:
    if len(runs) != 2 or any(run.trace is None for run in runs):
        return None
    places = (1, 0) if (runs[0].figures, runs[1].figures) == ("measured", "predicted") else (0, 1)
    first, second = (_traced(runs[place], "") for place in places)
    return explain_difference(first.recording, second.recording, places=places, progress=progress)


def read_side(path: Path | str) -> Side:
    """Read the figures of a trace or report.

    Raises:
        BadInput: the file is neither.
    """
    path = Path(path)
    data = read_bytes(path)
    try:
        content = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} is not a JSON object: {error}: name a file that --trace or --report wrote"
        ) from error
    if "traceEvents" in content:
        recording, about = read_trace(path)
        return side_of_recording(path.name, recording, about)
    try:
        return _side_of_report(path.name, msgspec.json.decode(data, type=_Report))
    except msgspec.DecodeError as error:
        raise BadInput(f"{path} is not the report of a run: {error}: write one with --report") from error


def side_of_recording(title: str, recording: Recording, about: About) -> Side:
    """Compute the figures of a recording."""
    summary = summarize(recording)
    ranks = len({lane.rank for lane in recording.lanes})
    seconds = {step.step: step.seconds for step in summary.steps}
    decode = [value for step, value in seconds.items() if step > 0]
    values = _totals(
        seconds.get(-1), seconds.get(0), decode[1:] if recording.trimmed else decode, summary.seconds
    )
    values[Measure("total", "run", "tasks", "tasks")] = summary.tasks
    values[Measure("total", "run", "moved", "bytes")] = summary.nbytes_moved
    for lane in summary.lanes:
        values |= _lane(lane_title(lane, ranks), lane.busy_seconds, lane.utilization)
    values |= _kinds(summary.kinds)
    values |= _memories(summary.peak_bytes)
    return Side(
        title=title,
        figures=about.figures,
        policy=about.policy,
        model=about.model,
        machine=about.machine,
        values=values,
        trace=Trace(recording, about),
    )


class _ReportLane(msgspec.Struct):
    busy_seconds: float
    utilization: float


class _Report(msgspec.Struct, kw_only=True):
    """The compared fields of a report; if `measured` is missing, reports with tokens count as measured."""

    lanes: dict[str, _ReportLane]
    measured: bool | None = None
    tokens: Any = None
    policy: str = ""
    model: str = ""
    machine: str = ""
    load_seconds: float | None = None
    prefill_seconds: float | None = None
    step_seconds: list[float] = []
    simulated_seconds: float | None = None
    decode_tokens_per_second: float | None = None
    throughput_tokens_per_second: float | None = None
    kinds: list[KindUse] = []
    peak_bytes: dict[str, int] = {}


def _side_of_report(title: str, report: _Report) -> Side:
    measured = report.tokens is not None if report.measured is None else report.measured
    whole = report.simulated_seconds
    if report.load_seconds is not None and report.step_seconds:
        whole = report.load_seconds + sum(report.step_seconds)
    values = _totals(report.load_seconds, report.prefill_seconds, report.step_seconds[1:], whole)
    rates = {"decode": report.decode_tokens_per_second, "throughput": report.throughput_tokens_per_second}
    for name, rate in rates.items():
        if rate is not None:
            values[Measure("total", name, "rate", "tokens/s")] = rate
    for name, lane in report.lanes.items():
        values |= _lane(name, lane.busy_seconds, lane.utilization)
    values |= _kinds(report.kinds)
    values |= _memories(report.peak_bytes)
    return Side(
        title=title,
        figures="measured" if measured else "predicted",
        policy=report.policy,
        model=report.model,
        machine=report.machine,
        values=values,
    )


def _totals(
    load: float | None, prefill: float | None, decode_steps: Sequence[float], whole: float | None
) -> dict[Measure, float]:
    mean = fmean(decode_steps) if decode_steps else None
    named = {"load": load, "prefill": prefill, "decode step": mean, "run": whole}
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


def _row(measure: Measure, runs: Sequence[Side]) -> Row:
    first = runs[0]
    base = first.values.get(measure)
    values = [run.values.get(measure) for run in runs]
    ratios = [value / base if value is not None and base else None for value in values]
    errors = [_error_percent(measure, first, run) for run in runs]
    return Row(
        section=measure.section,
        name=measure.name,
        what=measure.what,
        unit=measure.unit,
        values=values,
        ratios=ratios,
        error_percents=errors,
    )


def _error_percent(measure: Measure, first: Side, other: Side) -> float | None:
    """Error of a prediction in percent of the measurement; otherwise the difference of `other` from `first`."""
    tested, reference = other, first
    if first.figures == "predicted" and other.figures == "measured":
        tested, reference = first, other
    value, base = tested.values.get(measure), reference.values.get(measure)
    if value is None or base is None or (not base and value):
        return None
    return 100.0 * (value - base) / base if base else 0.0


def _text(value: float | None, unit: Unit) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "tasks":
        return f"{value:,.0f}"
    return f"{value:,.4g} {unit}"


def _cause(cause: Cause) -> list[str]:
    what = cause.kind or _WITHOUT_KIND[cause.what]
    means = ["–" if mean is None else format_seconds(mean) for mean in cause.means]
    tasks = f"{cause.tasks:,}" if cause.tasks else ""
    return [what, cause.lane, cause.phase, tasks, *means, _signed(cause.seconds), _percent(cause.share)]


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.0f} %"
