"""`moesched random-model`: a random checkpoint of a named shape, for tests of speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from moesched.cli import options
from moesched.cli.output import say

HELP = options.paragraphs(
    "Write a checkpoint of a named shape with random weights, in the format of published ones.",
    "Weights are streamed to disk, and never held in memory. The same shape, seed and dtype give the same "
    "weights.",
)

EPILOGUE = """Examples:

  moesched random-model mixtral-0.8b models/mixtral-0.8b
  moesched random-model mixtral-8x7b models/two-layers --layers 2 --seed 7"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(random_model, name="random-model", help=HELP, help_epilogue=EPILOGUE, sort_key=3)


def random_model(
    shape: Annotated[str, Parameter(help="A name of `moesched list models`.")],
    directory: Annotated[Path, Parameter(name="DIR", help="Folder to create.")],
    /,
    *,
    seed: Annotated[options.Whole, Parameter(help="Seed of the weights.")] = 0,
    layers: Annotated[
        options.Whole | None, Parameter(metavar="N", help="Number of layers. By default that of the shape.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], Parameter(help="Number format to store.")] = "bfloat16",
    json: options.Json = False,
) -> None:
    """See HELP."""
    from moesched.cli.output import Bar, print_json
    from moesched.models.random_model import write_random_model
    from moesched.models.reading import read_config
    from moesched.units import format_bytes

    with Bar(f"writing {directory}") as bar:
        written = write_random_model(shape, directory, seed, layers, dtype, progress=bar.update)
    nbytes = sum(file.stat().st_size for file in written.iterdir())
    if json:
        config = read_config(written)
        print_json(
            {
                "directory": str(written),
                "bytes": nbytes,
                "seed": seed,
                "layers": config.layers,
                "dtype": dtype,
            }
        )
    else:
        say(f"{written}: {format_bytes(nbytes)}")
