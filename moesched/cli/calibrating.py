"""`moesched calibrate`: this machine, measured into a machine file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from moesched.cli import options

HELP = options.paragraphs(
    "Measure this machine: memory bandwidth, matrix multiplication by size, the disk.",
    "It sees no model, policy or budget, so that what it predicts later is a prediction.",
)

EPILOGUE = """Examples:

  moesched calibrate
  moesched calibrate --out machines/mine.toml"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(calibrate, name="calibrate", help=HELP, help_epilogue=EPILOGUE, sort_key=6)


def calibrate(
    *,
    out: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="The file to write. By default the one that `--machine auto` reads."),
    ] = None,
    json: options.Json = False,
) -> None:
    """See HELP."""
