"""`moesched reproduce`: compares a paper's figures with simulated ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.cli.tables import print_table
from moesched.jobs.options import OUTPUT
from moesched.options import Option
from moesched.system.outputs import Output, require_outputs

if TYPE_CHECKING:
    from moesched.reproduce import Accuracy, Reproduction, Section
    from moesched.reproduce.report import Value

EPILOGUE = """Examples:

  moesched reproduce moe-lightning --only table-5
  moesched reproduce moe-lightning --out pictures --report reproduced.json
  moesched reproduce twiddler --only beams"""


@command(EPILOGUE)
def reproduce(
    paper: Annotated[
        str,
        Option("Paper to reproduce: moe-lightning, twiddler or mac-cluster.", "PAPER", flag="PAPER"),
    ],
    *,
    only: Annotated[
        tuple[str, ...],
        Option(
            "Sections to reproduce; by default all. Of moe-lightning: table-4, table-5, sustained, artifact, "
            "speedups, cpu-attention, cpu-memory, policy-map, scaling. Of twiddler: microbenchmarks, generation, "
            "prefill, beams, goals, measured, variants. Of mac-cluster: goals, table-3, table-4, prompts, "
            "table-5, table-6, figure-8, balanced, packing, wiring.",
            "SECTION",
            many=True,
        ),
    ] = (),
    out: Annotated[
        Path | None,
        Option("Folder for a picture of each section, as PNG and SVG.", "DIR", group=OUTPUT),
    ] = None,
    report: Annotated[
        Path | None, Option("Write the report to a file, as JSON.", "OUT", group=OUTPUT, writes="report")
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare a paper's figures with those of our schedules on the virtual clock, cell by cell.

    moe-lightning: three rates that the paper does not give are fitted to three cells of its Table 4; all else is
    predicted. twiddler: its two environments, its three scenarios, and the policies that it compares with. mac-cluster:
    simulated Mac Studios that share a model's experts over Ethernet, and the bound of Eq. 1. --out draws each section,
    and needs matplotlib: pip install 'moesched[plots]'.
    """
    from moesched.reproduce import reproduce_paper
    from moesched.reproduce.picture import draw_reproduction, picture_files, require_folder
    from moesched.reproduce.report import write_reproduction

    options.require_json(report, "a reproduction has")
    if out is not None:
        require_folder(out)
    pictures = [] if out is None else picture_files(paper, out)
    require_outputs(*(Output("picture", file) for file in pictures), Output("report", report))
    with Bar("reproducing") as bar:
        reproduction = reproduce_paper(paper, only, lambda what: bar.update(0, what=what))
        if report is not None:
            write_reproduction(reproduction, report)
        if out is not None:
            draw_reproduction(reproduction, out)
    if json:
        print_json(reproduction)
    else:
        print_reproduction(reproduction)


def print_reproduction(report: Reproduction) -> None:
    """Print the fitted rates, each section, and the errors of the tables' cells."""
    from moesched.reproduce.report import AGREEMENT

    say(f"\n{report.title}: the paper measured, ours is predicted\n")
    print_table(_columns(report.calibration), list(_rows(report.calibration)))
    for section in report.sections:
        say(f"\n{section.title}\n")
        if "as_drawn" in section.rows[0]:
            print_table(["workload", "", "system", "µ", "N/µ", *CELLS], list(_cells(section)), figures=8)
        else:
            print_table(_columns(section.rows), list(_rows(section.rows)))
        if section.claims:
            say()
            claims = [
                [
                    claim.where,
                    claim.what,
                    claim.paper,
                    claim.ours,
                    "yes" if claim.agrees else "no",
                    claim.because,
                ]
                for claim in section.claims
            ]
            print_table(["section", "claim", "paper", "ours", "agrees", "because"], claims)
        for note in section.notes:
            say(f"\n{note}")
    if any(section.claims for section in report.sections):
        say(f"\n{AGREEMENT}")
    if report.accuracy is not None and report.accuracy_as_drawn is not None:
        say(f"\nPredicted cells: {_accuracy(report.accuracy)}.")
        say(f"With FlexGen as Fig. 6 draws it: {_accuracy(report.accuracy_as_drawn)}.")
    if report.accuracy_sustained is not None:
        say(f"At sustained rates, of which no cell set any: {_accuracy(report.accuracy_sustained)}.")


CELLS = ("paper", "ours", "error", "", "FlexGen as drawn", "bound by")


def _cells(section: Section) -> Iterator[list[str]]:
    for row in section.rows:
        drawn = row["as_drawn"]
        yield [
            str(row["workload"]),
            str(row["setting"]),
            str(row["system"]),
            str(row["micro_batch_size"]),
            str(row["micro_batches"]),
            f"{row['paper']:g}",
            f"{row['ours']:g}",
            f"{row['error']:+.1%}",
            "fitted" if row["fitted"] else "predicted",
            "" if drawn is None else f"{drawn:g}",
            f"{row['bound_by']} {row['busy']:.0%}",
        ]


def _columns(rows: Sequence[Mapping[str, Value]]) -> list[str]:
    return [each.replace("_", " ") for each in rows[0]]


def _rows(rows: Sequence[Mapping[str, Value]]) -> Iterator[list[str]]:
    for row in rows:
        yield [f"{value:g}" if isinstance(value, float) else str(value) for value in row.values()]


def _accuracy(accuracy: Accuracy) -> str:
    order = f"{accuracy.pairs - len(accuracy.wrong)} of {accuracy.pairs} pairs more than 20 % apart in order"
    wrong = f" (not: {'; '.join(accuracy.wrong)})" if accuracy.wrong else ""
    return f"median error {accuracy.median_error:.1%} of {accuracy.cells}, {order}{wrong}"
