"""`moesched compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from moesched.cli import options

HELP = options.paragraphs(
    "Put runs side by side: totals, lanes, kinds of task, memories; predicted against measured.",
    "Each run is a file that --trace or --report wrote. The first one is what the others are held against; where only "
    "one of two is predicted, its error is in percent of the measured one.",
)

EPILOGUE = """Example:

  moesched compare out/measured.json out/predicted.json"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(compare, name="compare", help=HELP, help_epilogue=EPILOGUE, sort_key=5)


def compare(
    first: Annotated[Path, Parameter(name="A", help="A trace or a report.")],
    /,
    *others: Annotated[Path, Parameter(name="B", help="More of them.")],
    json: options.Json = False,
) -> None:
    """See HELP."""
    import msgspec

    from moesched.cli.output import print_json, print_table
    from moesched.compare import compare as hold_against

    comparison = hold_against([first, *others])
    if json:
        print_json(msgspec.to_builtins(comparison))
    else:
        header = comparison.header()
        print_table(header, comparison.table(), figures=len(header) - 2)
