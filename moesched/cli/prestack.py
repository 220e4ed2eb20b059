"""`moesched prestack`: a checkpoint whose experts' weights are in few large arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from moesched.cli import options
from moesched.cli.output import say

HELP = options.paragraphs(
    "Rewrite a checkpoint with its experts' weights in few large arrays instead of many small ones.",
    "By expert, one array has the matrices of one expert in all layers, for nodes that hold some of the "
    "experts. By layer, one array has one matrix of all experts of a layer, for a machine that holds all of "
    "them. The new checkpoint generates the same tokens as the old one.",
)

EPILOGUE = """Examples:

  moesched prestack models/dbrx models/dbrx-by-expert
  moesched prestack models/mixtral-0.8b models/stacked --by layer"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(prestack, name="prestack", help=HELP, help_epilogue=EPILOGUE, sort_key=3)


def prestack(
    model: Annotated[Path, Parameter(help="Folder of the checkpoint.")],
    directory: Annotated[Path, Parameter(name="OUT", help="Folder to create.")],
    /,
    *,
    by: Annotated[Literal["expert", "layer"], Parameter(help="Contents of one array.")] = "expert",
    json: options.Json = False,
) -> None:
    """See HELP."""
    from moesched.cli.output import Bar, print_json
    from moesched.models.prestack import prestack_model
    from moesched.units import format_bytes

    with Bar(f"writing {directory}") as bar:
        made = prestack_model(model, directory, by=by, progress=bar.update)
    if json:
        figures = {"by": made.by, "arrays": made.arrays, "largest_array_bytes": made.largest}
        print_json({"directory": str(made.directory), **figures, "other_bytes": made.others})
        return
    holds = "an expert's matrices of all layers" if by == "expert" else "one matrix of all experts of a layer"
    say(
        f"{made.directory}: {made.arrays} arrays of {format_bytes(made.largest)}, each {holds}, "
        f"beside {format_bytes(made.others)}"
    )
