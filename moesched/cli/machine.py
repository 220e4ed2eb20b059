"""`moesched machine`: a machine file from the names of a machine's parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from moesched.cli import options
from moesched.cli.files import Writes
from moesched.cli.output import print_lines, say

if TYPE_CHECKING:
    from moesched.machines.build import BuiltMachine, Parts

HELP = options.paragraphs(
    "Write a machine file from the names of a machine's parts, for `simulate` and `plan`.",
    "The figures are those of data sheets; a comment before each table says where they are from, and what was "
    "assumed. `moesched list parts` names the GPUs, chips and CPUs. Names may be short: 3090 is the RTX 3090. "
    "Without --out the file goes to standard output.",
)

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

GpuName = Annotated[
    str | None,
    Parameter(metavar="NAME", help='GPU, such as "RTX 3090"; "2x RTX 3090" for two.'),
]
ChipName = Annotated[
    str | None,
    Parameter(
        metavar="NAME",
        help='Chip whose CPU and GPU share one memory, such as "M2 Ultra"; instead of --gpu and --cpu.',
    ),
]
CpuName = Annotated[
    str | None,
    Parameter(metavar="NAME", help='CPU, such as "Ryzen 7950X"; "2x EPYC 7763" for two sockets.'),
]
Ram = Annotated[
    str | None,
    Parameter(
        metavar="RAM",
        help='Channels x type-speed, such as 2xDDR5-5600 (32 GB per channel are assumed), "2xDDR5-5600 64GB", or '
        'modules of a size, such as "2x32GB DDR5-5600". By default the fastest that the CPU supports. Of a chip '
        "only the size, such as 192GB.",
    ),
]
PcieSlot = Annotated[
    str | None,
    Parameter(
        name="--pcie",
        metavar="GENxLANES",
        help="The GPU's slot, such as 4x16. By default the fastest that both GPU and CPU have.",
    ),
]
DiskRate = Annotated[
    str | None,
    Parameter(
        metavar="RATE", help='Rate of the disk\'s reads, such as 7GB/s; "2TB 7GB/s" says its size, too.'
    ),
]
WeightsFrom = Annotated[
    Literal["host", "disk"] | None,
    Parameter(
        help="Memory that all weights come from: of a machine with a GPU the host's by default, otherwise the disk.",
    ),
]
PinnedSize = Annotated[
    str | None,
    Parameter(
        metavar="BYTES",
        help="Page-locked memory, if the system limits it; weights are then copied through it. By default all of the "
        "host's memory can be page-locked.",
    ),
]


def add_to(app: App) -> None:
    """Add the command."""
    app.command(machine, name="machine", help=HELP, help_epilogue=EPILOGUE, sort_key=6)


def machine(
    *,
    gpu: GpuName = None,
    pcie: PcieSlot = None,
    cpu: CpuName = None,
    ram: Ram = None,
    disk: DiskRate = None,
    chip: ChipName = None,
    weights: WeightsFrom = None,
    pinned: PinnedSize = None,
    name: Annotated[
        str | None, Parameter(metavar="NAME", help="The machine's name. By default that of its parts.")
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(group=options.OUTPUT, metavar="FILE", help="Machine file to write."),
        Writes("machine file"),
    ] = None,
    json: options.Json = False,
) -> None:
    """See HELP."""
    from moesched.machines.build import Parts, build_machine
    from moesched.machines.commented_toml import commented_toml
    from moesched.system.whole_file import whole_file

    parts = Parts(
        gpu=gpu, chip=chip, cpu=cpu, ram=ram, pcie=pcie, disk=disk, weights=weights, pinned=pinned, name=name
    )
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
    """The command that builds the machine again."""
    from shlex import quote

    import msgspec

    given = [
        f"--{key} {quote(value)}" for key, value in msgspec.structs.asdict(parts).items() if value is not None
    ]
    return f"Built by: moesched machine {' '.join(given)}"


def _print_json(built: BuiltMachine, out: Path | None) -> None:
    import msgspec

    from moesched.cli.output import print_json

    print_json(
        {
            "file": None if out is None else str(out),
            "machine": msgspec.to_builtins(built.machine),
            "sources": built.comments,
            "assumed": built.assumed,
        }
    )


def _print_written(built: BuiltMachine, out: Path) -> None:
    from moesched.cli.calibrate import print_machine

    print_machine(built.machine)
    say(f"\n{built.machine.description}")
    for each in built.assumed:
        say(f"Assumed: {each}")
    say(f"\nWritten to {out}: `moesched simulate --machine {out}` and `moesched plan --machine {out}` use it")
