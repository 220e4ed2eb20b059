"""`moesched compare`: compares runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.cli.tables import print_table
from moesched.jobs.options import OUTPUT
from moesched.options import Option
from moesched.system.outputs import is_html
from moesched.system.whole_file import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesched.analysis.compared_runs import ComparedRun
    from moesched.analysis.comparison import Comparison

EPILOGUE = """Examples:

  moesched compare out/measured.json out/predicted.json --trace out/both.json

  moesched compare out/cgopipe.json out/flexgen.json --report out/both.html

  moesched compare out/measured.json --replayed"""


@command(EPILOGUE)
def compare(
    first: Annotated[Path, Option("Trace or report of a run.", flag="A")],
    others: Annotated[tuple[Path, ...], Option("Traces or reports to compare with it.", flag="B")],
    replayed: Annotated[
        bool,
        Option(
            "Compare A with a replay of its task graph and durations on the virtual clock. The "
            "difference is time between tasks."
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        Option(
            "Write all runs to one trace for ui.perfetto.dev, shifted so that decoding starts at the same time.",
            "OUT",
            group=OUTPUT,
            writes="trace",
        ),
    ] = None,
    report: options.ReportFile = None,
    json: options.Json = False,
) -> None:
    """Compare runs, measured or predicted: the fastest, reasons for the difference, totals, lanes, tasks and memories.

    Each run is a file from --trace or --report. The first run is the baseline of the others; if one of two runs is
    predicted and the other measured, the table shows the prediction's error in percent. For two traces it also explains
    why one took longer: by kind of task, by lane, and by the time between tasks. Reports on requests that arrive over
    time are compared by the times of their requests. An HTML report (--report) shows timelines only for runs that are
    read from traces.
    """
    from moesched.analysis.compare import compare_runs, read_runs
    from moesched.cli.results import say_where

    files = [first, *others]
    with Bar("comparing") as bar:
        runs = read_runs(files, replayed=replayed)
        comparison = compare_runs(runs, trace=trace, progress=bar.update)
        if report is not None:
            _write_report(report, comparison, runs)
    if json:
        print_json(msgspec.to_builtins(comparison))
        return
    if answer := comparison.answer():
        say(answer)
    if comparison.difference is not None:
        _print_difference(comparison)
    header = comparison.header()
    print_table(header, comparison.table(), figures=len(header) - 2)
    say_where(trace, report if is_html(report) else None)


def _write_report(path: Path, comparison: Comparison, runs: Sequence[ComparedRun]) -> None:
    from moesched.trace import TitledRun

    if not is_html(path):
        write_json(path, "report", comparison)
        return
    from moesched.report import write_comparison_page

    shown = [TitledRun(run.title, *run.trace) for run in runs if run.trace is not None]
    write_comparison_page(path, comparison, shown)


def _print_difference(comparison: Comparison) -> None:
    say("\n".join(comparison.reasons()))
    tables = {
        "What makes the difference": (comparison.causes(), 5, ("tasks", "share")),
        "By lane": (comparison.lane_causes(), 4, ()),
        "Longest waits on the critical path": (comparison.waits(), 2, ()),
    }
    for title, ((header, rows), figures, spare) in tables.items():
        if rows:
            say(f"\n{title}")
            print_table(header, rows, figures=figures, spare=spare)
    say("\nAll figures")
