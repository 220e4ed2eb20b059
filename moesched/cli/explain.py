"""`moesched explain`: explains where the time of a run went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moesched.analysis.run_changes import CHOICES, NO_HANDOVERS
from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.cli.tables import print_table
from moesched.options import Option
from moesched.system.outputs import is_html
from moesched.system.whole_file import write_json

if TYPE_CHECKING:
    from moesched.analysis.explanation import Explanation
    from moesched.trace import Trace

EPILOGUE = """Examples:

  moesched simulate --model mixtral-8x7b --machine t4 --policy cgopipe \\
      --workload mtbench --gen 16 --trace out/cgopipe.json

  moesched explain out/cgopipe.json

  moesched explain out/cgopipe.json --report out/cgopipe.html

  moesched explain out/cgopipe.json --what-if "link host->gpu x2" \\
      --what-if "kernel post_attention x0.5, no handovers\""""


@command(EPILOGUE)
def explain(
    trace: Annotated[Path, Option("A trace that --trace wrote.", flag="TRACE")],
    *,
    what_if: Annotated[
        tuple[str, ...],
        Option(
            f'Replay the run with a change: {CHOICES}, "{NO_HANDOVERS}" (no time between tasks), '
            "or several of them, with commas; repeatable.",
            "CHANGE",
        ),
    ] = (),
    report: options.ReportFile = None,
    json: options.Json = False,
) -> None:
    """Explain where the time of a run went, measured or predicted, from its trace.

    First the bottleneck: the lane or cause on the critical path that costs the run most time. The critical path is the
    chain of tasks that determined the end of the run. Then each lane: how long it was busy, and what it waited for
    while it was idle. Then the critical path, the longest idle spans, the pools, and the time between tasks.

    Causes of idle time: data (a task computed or moved what the next one reads), lane (another task of the same lane
    ran), budget (no room: the pages to overwrite were in use), router (the policy awaited the choice of experts), rank
    (another rank had not come to an exchange between ranks), policy (its own Python ran), host (moesched itself ran,
    or a thread woke up), finished (no further task).
    """
    from moesched.analysis.explanation import explain as explained
    from moesched.trace import read_trace

    with Bar(f"reading {trace}") as bar:
        run = read_trace(trace)
        bar.update(0, what="explaining")
        explanation = explained(run.recording, run.about, what_if, bar.update)
        if report is not None:
            _write_report(report, run, explanation)
    if json:
        print_json(explanation)
        return
    print_explanation(explanation, trace)
    if report is not None:
        say(f"\nreport: {report}")


def _write_report(path: Path, run: Trace, explanation: Explanation) -> None:
    if not is_html(path):
        write_json(path, "report", explanation)
        return
    from moesched.report import write_run_page

    write_run_page(path, run.recording, run.about, explanation=explanation)


def print_explanation(explanation: Explanation, trace: Path) -> None:
    """Print an explanation, the most important part first; suggested commands name the trace's file."""
    from moesched.analysis.explanation_tables import first_lines, tables_of
    from moesched.analysis.what_if import DECISIONS_HELD
    from moesched.cli.report_tables import say_helps

    say("\n".join(first_lines(explanation)))
    say_helps(explanation.helps, trace)
    for title, (columns, rows, figures) in tables_of(explanation).items():
        say("" if title == "Lanes" else f"\n{title}")
        print_table(columns, rows, figures=figures)
    if any(each.decisions_unchanged for each in explanation.what_if):
        say(f"\n{DECISIONS_HELD}")
