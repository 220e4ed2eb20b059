"""`moesched machine`: writes a machine file from the names of a machine's parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from moesched.cli import options
from moesched.cli.calibrate import print_machine
from moesched.cli.command import command
from moesched.cli.output import print_json, print_lines, say
from moesched.jobs.options import OUTPUT
from moesched.options import Option, Options, part_of
from moesched.system.whole_file import whole_file

if TYPE_CHECKING:
    from moesched.machines.build import BuiltMachine, Parts

EPILOGUE = options.paragraphs(
    "Examples:",
    """  moesched machine --gpu "RTX 3090" --pcie 4x16 --cpu "Ryzen 7950X" \\
      --ram 2xDDR5-5600 --disk 7GB/s --out my.toml
  moesched simulate --model qwen3-30b-a3b --machine my.toml \\
      --policy expert_cache --workload uniform""",
    """  moesched machine --gpu "2x RTX 3090" --cpu "EPYC 7302" \\
      --ram "8x32GB DDR4-3200"
  moesched machine --chip "M2 Ultra" --ram 192GB
  moesched machine --cpu "2x EPYC 9654" --ram "24x32GB DDR5-4800" \\
      --disk "4TB 12GB/s\"""",
)


class PartsArguments(Options):
    """Options that name the parts of a machine."""

    gpu: Annotated[str | None, Option('GPU, such as "RTX 3090"; "2x RTX 3090" for two.', "NAME")] = None
    pcie: Annotated[
        str | None,
        Option(
            "The GPU's slot, such as 4x16. By default the fastest that both GPU and CPU have.",
            "GENxLANES",
            flag="--pcie",
        ),
    ] = None
    cpu: Annotated[
        str | None, Option('CPU, such as "Ryzen 7950X"; "2x EPYC 7763" for two sockets.', "NAME")
    ] = None
    ram: Annotated[
        str | None,
        Option(
            'Channels x type-speed, such as 2xDDR5-5600 (32 GB per channel are assumed), "2xDDR5-5600 64GB", or '
            'modules of a size, such as "2x32GB DDR5-5600". By default the fastest that the CPU supports. Of a chip '
            "only the size, such as 192GB.",
            "RAM",
        ),
    ] = None
    disk: Annotated[
        str | None,
        Option('Rate of the disk\'s reads, such as 7GB/s; "2TB 7GB/s" says its size, too.', "RATE"),
    ] = None
    chip: Annotated[
        str | None,
        Option(
            'Chip whose CPU and GPU share one memory, such as "M2 Ultra"; instead of --gpu and --cpu.', "NAME"
        ),
    ] = None
    weights: Annotated[
        Literal["host", "disk"] | None,
        Option(
            "Memory that all weights come from: of a machine with a GPU the host's by default, otherwise the disk."
        ),
    ] = None
    pinned: Annotated[
        str | None,
        Option(
            "Page-locked memory, if the system limits it; weights are then copied through it. By default all of the "
            "host's memory can be page-locked.",
            "BYTES",
        ),
    ] = None
    name: Annotated[str | None, Option("The machine's name. By default that of its parts.", "NAME")] = None


@command(EPILOGUE)
def machine(
    given: PartsArguments,
    out: Annotated[
        Path | None, Option("Machine file to write.", "FILE", group=OUTPUT, writes="machine file")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a machine file from the names of a machine's parts, for `simulate` and `plan`.

    The figures are those of data sheets; a comment before each table says where they are from, and what was assumed.
    `moesched list parts` names the GPUs, chips and CPUs. Names may be short: 3090 is the RTX 3090. Without --out the
    file goes to standard output.
    """
    from moesched.machines.build import Parts, build_machine
    from moesched.machines.commented_toml import commented_toml

    parts = Parts(**part_of(given, PartsArguments))
    built = build_machine(parts)
    text = commented_toml(built.machine, built.comments, _heading(parts))
    if out is not None:
        with whole_file(out, "machine file") as file:
            file.write(text.encode())
    if json:
        _print_json(built, out)
    elif out is None:
        print_lines(text.rstrip("\n").split("\n"))
    else:
        _print_written(built, out)


def _heading(parts: Parts) -> str:
    """Return the comment at the top of a machine's file: the command that builds the machine again."""
    from shlex import quote

    given = [
        f"--{key} {quote(value)}" for key, value in msgspec.structs.asdict(parts).items() if value is not None
    ]
    return f"Built by: moesched machine {' '.join(given)}"


def _print_json(built: BuiltMachine, out: Path | None) -> None:
    print_json(
        {
            "file": None if out is None else str(out),
            "machine": msgspec.to_builtins(built.machine),
            "sources": built.comments,
            "assumed": built.assumed,
        }
    )


def _print_written(built: BuiltMachine, out: Path) -> None:
    print_machine(built.machine)
    say(f"\n{built.machine.description}")
    for each in built.assumed:
        say(f"Assumed: {each}")
    say(f"\nWritten to {out}: `moesched simulate --machine {out}` and `moesched plan --machine {out}` use it")
