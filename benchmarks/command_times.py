"""How long commands take from their start to their end, Python's own included.

    python benchmarks/command_times.py

Medians of several runs, in a process each. Writes results/command_times-<machine>.json.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median
from time import perf_counter
from typing import NamedTuple

from _results import named_for_machine, write_result
from rich.progress import track

MTBENCH = "--model mixtral-8x7b --machine t4 --workload mtbench --gen 128"


class Command(NamedTuple):
    """A command line, and how many seconds it may take; None where nothing was promised."""

    line: str
    bar: float | None = None
    repeats: int = 3


COMMANDS = (
    Command("--help", repeats=5),
    Command("list policies", repeats=5),
    Command(f"plan {MTBENCH}", bar=8.0),
    Command(f"simulate {MTBENCH} --policy cgopipe --requests 8192", bar=60.0),
)


def main() -> None:
    """Run all commands and write what they took."""
    rows = [timed(command) for command in track(COMMANDS, description="running commands")]
    print(write_result(named_for_machine("command_times"), {"commands": rows}))


def timed(command: Command) -> dict[str, object]:
    """One command, several times."""
    seconds = [once(command.line) for _ in range(command.repeats)]
    return {
        "command": f"moesched {command.line}",
        "seconds": median(seconds),
        "runs": seconds,
        "bar": command.bar,
        "reached": None if command.bar is None else median(seconds) <= command.bar,
    }


def once(line: str) -> float:
    """Seconds of one process."""
    started = perf_counter()
    subprocess.run([sys.executable, "-m", "moesched", *line.split()], check=True, capture_output=True)
    return round(perf_counter() - started, 2)


if __name__ == "__main__":
    main()
