"""`moesched random-model`: writes a random checkpoint of a named shape, for tests of speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.models.coded_models import MIXES
from moesched.options import Option
from moesched.units import format_bytes

EPILOGUE = """Examples:

  moesched random-model mixtral-0.8b models/mixtral-0.8b
  moesched random-model mixtral-0.8b models/mixtral-0.8b-q8_0 --format q8_0
  moesched random-model mixtral-0.8b models/mixtral-0.8b.gguf --format q4_k_m
  moesched random-model mixtral-8x7b models/two-layers --layers 2 --seed 7"""


@command(EPILOGUE)
def random_model(
    shape: Annotated[str, Option("A name of `moesched list models`.", flag="SHAPE")],
    directory: Annotated[Path, Option("Folder to create, or file whose name ends in .gguf.", flag="PATH")],
    *,
    seed: Annotated[int, Option("Seed of the weights.")] = 0,
    layers: Annotated[int | None, Option("Number of layers. By default that of the shape.", "N")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], Option("Number format to store.")] = "bfloat16",
    stored_as: Annotated[
        str | None,
        Option(
            f"Format of the matrices: {', '.join(MIXES)}. Norms and routers are then in float32. "
            "By default all weights have that of --dtype.",
            "NAME",
            flag="--format",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a checkpoint of a named shape with random weights, in the format of published ones.

    Weights are streamed to disk, and never held in memory. Equal arguments give equal weights.
    """
    from moesched.models.random_model import write_random_model
    from moesched.models.reading import read_config

    with Bar(f"writing {directory}") as bar:
        written = write_random_model(
            shape, directory, seed, layers, dtype, progress=bar.update, stored_as=stored_as
        )
    files = [written] if written.is_file() else written.iterdir()
    nbytes = sum(file.stat().st_size for file in files)
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
