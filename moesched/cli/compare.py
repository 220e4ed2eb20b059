"""`moesched compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from moesched.cli import options

if TYPE_CHECKING:
    from moesched.analysis.comparison import Comparison

HELP = options.paragraphs(
    "Put runs side by side: what makes the difference, then totals, lanes, kinds of task, memories; predicted against "
    "measured.",
    "Each run is a file that --trace or --report wrote. The first one is what the others are held against; where only "
    "one of two is predicted, its error is in percent of the measured one. Of two traces it is also said why one took "
    "longer: which tasks, on which lane, and how much passed between tasks.",
)

EPILOGUE = """Examples:

  moesched compare out/measured.json out/predicted.json --trace out/both.json

  moesched compare out/measured.json --replayed"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(compare, name="compare", help=HELP, help_epilogue=EPILOGUE, sort_key=5)


def compare(
    first: Annotated[Path, Parameter(name="A", help="A trace or a report.")],
    /,
    *others: Annotated[Path, Parameter(name="B", help="More of them.")],
    replayed: Annotated[
        bool,
        Parameter(
            negative="",
            help="Beside A, its own graph with its own durations on the virtual clock, start times not reused: how "
            "much of A's time they explain.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        Parameter(
            group=options.OUTPUT,
            metavar="OUT",
            help="Write all as one trace for ui.perfetto.dev, moved so that decoding starts together.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """See HELP."""
    import msgspec

    from moesched.analysis.compare import compare as hold_against
    from moesched.cli.output import Bar, print_json, print_table

    with Bar("comparing") as bar:
        comparison = hold_against([first, *others], replayed=replayed, trace=trace, progress=bar.update)
    if json:
        print_json(msgspec.to_builtins(comparison))
        return
    if comparison.difference is not None:
        _print_difference(comparison)
    header = comparison.header()
    print_table(header, comparison.table(), figures=len(header) - 2)
    if trace is not None:
        print(f"\nboth as one trace: {trace}")


def _print_difference(comparison: Comparison) -> None:
    from moesched.cli.output import print_table

    print("\n".join(comparison.reasons()))
    tables = {
        "What makes the difference": (comparison.causes(), 5),
        "By lane": (comparison.lane_causes(), 4),
        "Longest waits on the critical path": (comparison.waits(), 2),
    }
    for title, ((header, rows), figures) in tables.items():
        if rows:
            print(f"\n{title}")
            print_table(header, rows, figures=figures)
    print("\nAll figures")
