"""`moesched prestack`: rewrites a checkpoint with its experts' weights in few large arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.options import Option
from moesched.units import format_bytes

EPILOGUE = """Examples:

  moesched prestack models/dbrx models/dbrx-by-expert
  moesched prestack models/mixtral-0.8b models/stacked --by layer"""


@command(EPILOGUE)
def prestack(
    model: Annotated[Path, Option("Folder of the checkpoint.", flag="MODEL")],
    directory: Annotated[Path, Option("Folder to create.", flag="OUT")],
    *,
    by: Annotated[Literal["expert", "layer"], Option("Contents of one array.")] = "expert",
    json: options.Json = False,
) -> None:
    """Rewrite a checkpoint with its experts' weights in few large arrays instead of many small ones.

    With --by expert, an array has the matrices of one expert in all layers, for nodes that hold some of the experts.
    With --by layer, an array has one matrix of all experts of a layer, for a machine that holds all of them. The new
    checkpoint generates the same tokens as the old one.
    """
    from moesched.models.prestack import prestack_model

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
