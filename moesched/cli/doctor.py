"""`moesched doctor`: checks whether this machine can run models, with a remedy for each trouble."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.failures import FAILED
from moesched.cli.output import Bar, print_json, say
from moesched.jobs.options import OUTPUT
from moesched.options import Option
from moesched.system.whole_file import write_json

if TYPE_CHECKING:
    from moesched.doctor.examination import Examination
    from moesched.doctor.findings import Finding

EPILOGUE = """Examples:

  moesched doctor
  moesched doctor --device cuda --model models/mixtral --out doctor.json
  moesched doctor --device mlx --hosts cluster.toml"""


@command(EPILOGUE)
def doctor(
    *,
    device: Annotated[
        Literal["cpu", "cuda", "mlx"] | None,
        Option("Run a tiny model on this device under every policy. By default nothing runs."),
    ] = None,
    model: Annotated[
        Path | None,
        Option("A model's folder or GGUF file; its files should be readable, and directly.", "PATH"),
    ] = None,
    hosts: Annotated[
        Path | None, Option("A cluster file; its machines are asked by ssh, and its ports.", "FILE")
    ] = None,
    out: Annotated[
        Path | None,
        Option("Write everything that was found as JSON.", "FILE", group=OUTPUT, writes="doctor's file"),
    ] = None,
    json: options.Json = False,
) -> int:
    """Look at this machine and say what will work: one line for each thing, and a remedy for each trouble.

    It looks at the processor and the kernels for it, cores, memory, locked memory, the folders of the cache and of a
    model, the clock, CUDA, and MLX on a Mac. With --hosts it logs in to the machines of a cluster file by ssh and tries
    their ports; start no run meanwhile.

    With --device a tiny random model runs there under every policy: each has to generate the same tokens as the CPU,
    memory has to stay within the prediction, a trace has to be complete, and lack of memory and Ctrl-C have to end a
    run properly. It takes about half a minute, or a few minutes on a new GPU.

    --out writes all results to a file; attach it when you report a problem. The file names the processor, the GPU,
    folders and the machines of the cluster file, and nothing else of yours.

    Exit code 1 if there are troubles.
    """
    from moesched.doctor.examination import examine, gather_facts
    from moesched.doctor.trial import try_device

    began = time.monotonic()
    with Bar("looking") as bar:
        found = examine(gather_facts(device or "", model, hosts))
        if device is not None:
            trial = try_device(device, found.facts, lambda done, total, what: bar.update(done, total, what))
            found = msgspec.structs.replace(found, trial=trial)
    found = msgspec.structs.replace(found, seconds=round(time.monotonic() - began, 1))
    if out is not None:
        write_json(out, "doctor's file", found)
    print_json(found) if json else _print(found, out)
    return FAILED if found.troubles else 0


def _print(found: Examination, out: Path | None) -> None:
    for finding in (*found.findings, *found.trial):
        say(_line(finding))
    count = len(found.troubles)
    verdict = "all well" if not count else f"{count} trouble{'s' * (count > 1)}"
    say(f"\n{verdict}, {found.seconds:.0f} s" + (f"; written to {out}" if out else ""))


def _line(finding: Finding) -> str:
    if not finding.is_trouble:
        return f"ok       {finding.about}: {finding.says}"
    return f"TROUBLE  {finding.about}: {finding.says}: {finding.remedy}"
