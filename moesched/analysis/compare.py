"""Compares runs, predicted or measured, by totals, lanes and kinds of task; runs are read from traces or reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from moesched.analysis.compared_runs import ComparedRun, Measure, read_run, replayed_run, trace_of
from moesched.analysis.comparison import Comparison, Row, Title
from moesched.analysis.difference import Difference, explain_difference
from moesched.errors import BadInput
from moesched.keywords import takes
from moesched.options import Option, Options
from moesched.system.cells import counted_in_cell
from moesched.system.input_file import given_path
from moesched.system.outputs import Output, require_outputs
from moesched.system.own_loop import interruptible
from moesched.system.plain_text import plain_text
from moesched.trace.chrome_writer import TitledRun, write_side_by_side


class CompareOptions(Options):
    """The options of `compare_runs`."""

    sources: Annotated[
        ComparedRun | Path | str | Sequence[ComparedRun | Path | str],
        Option(
            "Two or more runs, each as a `ComparedRun` or as the file of its trace or report; with `replayed`, one is "
            "enough."
        ),
    ] = field(kw_only=False)
    replayed: Annotated[
        bool, Option("Whether to add a replay of the first run's graph and durations on the virtual clock.")
    ] = False
    trace: Annotated[Path | str | None, Option("File to write all runs to as a single trace.")] = None
    progress: Annotated[
        Callable[[int, int], object] | None,
        Option("Called with (replays done, all replays) while the difference is computed."),
    ] = None


@takes(CompareOptions)
@interruptible()
def compare_runs(given: CompareOptions) -> Comparison:
    """Compare runs with the first run in `sources`.

    Raises:
        BadInput: there are fewer than two runs and no replay, a file is neither a trace nor a report, or a report is
            given where a trace is needed.
    """
    sources, trace = given.sources, given.trace
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        sources = [sources]
    files = [given_path(source, "a run") for source in sources if not isinstance(source, ComparedRun)]
    require_outputs(Output("trace", trace), inputs=files)
    runs = read_runs(sources, replayed=given.replayed)
    if trace is not None:
        shown = [TitledRun(run.title, *trace_of(run, "--trace shows")) for run in runs]
        write_side_by_side(trace, shown)
    measures = dict.fromkeys(measure for run in runs for measure in run.values)
    order = ("total", "request", "lane", "kind", "memory")
    return Comparison(
        runs=[
            Title(
                title=run.title,
                figures=run.figures,
                policy=run.policy,
                model=run.model,
                machine=run.machine,
                replayed=run.replayed,
                costs_measured=run.costs_measured,
            )
            for run in runs
        ],
        rows=[
            _row(measure, runs) for measure in sorted(measures, key=lambda each: order.index(each.section))
        ],
        difference=_difference(runs, given.progress or counted_in_cell("replaying")),
    )


def read_runs(sources: Sequence[ComparedRun | Path | str], *, replayed: bool = False) -> list[ComparedRun]:
    """Read the runs to compare; with `replayed`, a replay of the first run is inserted as the second run.

    Raises:
        BadInput: there are fewer than two runs, a file is neither a trace nor a report, or a report is to be replayed.
    """
    if len(sources) + replayed < 2:
        raise BadInput(f"{len(sources)} run given: name two traces or reports to compare")
    runs = [source if isinstance(source, ComparedRun) else read_run(source) for source in sources]
    names = Counter(run.title for run in runs)
    runs = [
        run
        if isinstance(source, ComparedRun) or names[run.title] == 1
        else replace(run, title=plain_text(str(source)))
        for source, run in zip(sources, runs, strict=True)
    ]
    if replayed:
        runs.insert(1, replayed_run(runs[0]))
    return runs


def _difference(
    runs: Sequence[ComparedRun], progress: Callable[[int, int], object] | None
) -> Difference | None:
    if len(runs) != 2 or any(run.trace is None for run in runs):
        return None
    places = (1, 0) if (runs[0].figures, runs[1].figures) == ("measured", "predicted") else (0, 1)
    first, second = (trace_of(runs[place], "") for place in places)
    return explain_difference(first.recording, second.recording, places=places, progress=progress)


def _row(measure: Measure, runs: Sequence[ComparedRun]) -> Row:
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


def _error_percent(measure: Measure, first: ComparedRun, other: ComparedRun) -> float | None:
    """Return the error of the predicted figure in percent of the measured one.

    The result is None if both runs are predicted or both measured, if a run lacks the figure, or if only the measured
    figure is 0.
    """
    if first.figures == other.figures:
        return None
    tested, reference = (first, other) if first.figures == "predicted" else (other, first)
    value, base = tested.values.get(measure), reference.values.get(measure)
    if value is None or base is None or (not base and value):
        return None
    return 100.0 * (value - base) / base if base else 0.0
