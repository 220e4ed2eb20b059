"""`moesched calibrate`: measures this machine and writes a machine file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, print_lines, say
from moesched.cli.tables import print_table
from moesched.errors import BadInput, report_of
from moesched.options import Option
from moesched.units import format_bytes, format_flops

if TYPE_CHECKING:
    from moesched.machines import Machine

EPILOGUE = """Examples:

  moesched calibrate
  moesched calibrate --thorough --out machines/mine.toml
  moesched calibrate --device cuda --out machines/gpu.toml"""


@command(EPILOGUE)
def calibrate(
    *,
    out: Annotated[
        Path | None,
        Option(
            "Machine file to write. By default the one that `--machine auto` reads.",
            "FILE",
            writes="machine file",
        ),
    ] = None,
    device: Annotated[
        Literal["torch", "cuda"],
        Option("The device to measure: torch, this machine without a GPU, or cuda, with one."),
    ] = "torch",
    thorough: Annotated[
        bool, Option("Measure both dtypes at more points; takes three to seven minutes.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Measure the speed of this machine: memory, disk, matrix products, attention and experts.

    Predictions for any model, policy and budget use this file. A calibration takes about half a minute: it measures
    costs in bfloat16, estimates costs in float32 by scaling, and times products with coded weights. With --thorough it
    measures both dtypes, takes three to seven minutes, and is more exact. Close other programs if you can. Ctrl-C keeps
    the old file.

    With --device cuda it measures the GPU and its host instead: matrix products by number of rows, copies of pages
    alone and several at once, the time to start each kind of task, and attention on the host beside copies.
    """
    from moesched.calibration.calibrate import calibrate_machine
    from moesched.calibration.gpu_machine import calibrate_gpu
    from moesched.machines.local import calibrated_file

    try:
        with Bar("measuring") as bar:
            if device == "cuda":
                machine = calibrate_gpu(device, out, bar.update, thorough=thorough)
            else:
                machine = calibrate_machine(out, bar.update, thorough=thorough)
    except BadInput as error:
        print_unwritten(error, json=json)
        raise
    option = "--device cuda --machine auto" if device == "cuda" else "--machine auto"
    file = out or calibrated_file("cuda" if device == "cuda" else "")
    print_calibration(machine, file, "" if out else f"; `{option}` uses it from now on", json=json)


def print_calibration(machine: Machine, file: Path, used: str, *, json: bool) -> None:
    """Print a calibrated machine and the path of its file, as a table and text, or with `json` as JSON.

    Args:
        used: text after the file's path, such as the option that reads the file; empty for none.
    """
    if json:
        print_json({"file": str(file), "machine": msgspec.to_builtins(machine)})
        return
    print_machine(machine)
    say(f"\n{machine.description}\n\nWritten to {file}{used}")


def print_unwritten(error: BadInput, *, json: bool) -> None:
    """Print a measured machine whose file could not be written: as the file's text, or with `json` as JSON.

    Args:
        error: the error of the calibration; nothing is printed if it came before the end of the measurements.
    """
    from moesched.machines.toml_text import machine_toml

    machine: Machine | None = report_of(error)
    if machine is None:
        return
    if json:
        print_json({"file": None, "machine": msgspec.to_builtins(machine)})
    else:
        print_lines(machine_toml(machine).splitlines())


def print_machine(machine: Machine) -> None:
    """Print the rates of a machine as a table."""
    rows = [
        ["processor", name, f"{format_flops(rate)} {dtype}"]
        for name, processor in machine.processors.items()
        for dtype, rate in processor.flops.items()
    ]
    for name, tier in machine.memories.items():
        locked = ", page-locked" if machine.page_locked and name == machine.host.memory else ""
        rows.append(["memory", name, f"{format_bytes(tier.bandwidth)}/s{locked}"])
    lanes = {link.lane: link for link in machine.links}
    rows += [["link", lane, f"{format_bytes(link.bandwidth)}/s"] for lane, link in lanes.items()]
    if machine.staging is not None:
        rows.append(["staging", "host->pinned", f"{format_bytes(machine.staging.bandwidth)}/s"])
    print_table(["", machine.name, ""], rows)
