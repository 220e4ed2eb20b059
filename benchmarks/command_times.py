"""Time commands from start to end, Python's own start included.

Each run is a process of its own; medians count.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

from _options import SIMULATION, Benchmark, track

MTBENCH = "--model mixtral-8x7b --machine t4 --workload mtbench --gen 128"


class Command(NamedTuple):
    """A command line, and how many seconds it may take; None where nothing was promised."""

    line: str
    bar: float | None = None


COMMANDS = (
    Command("--help"),
    Command("list policies"),
    Command(f"plan {MTBENCH}", bar=8.0),
    Command(f"simulate {MTBENCH} --policy cgopipe --requests 8192", bar=60.0),
)


BENCHMARK = Benchmark(
    __doc__,
    "command_times",
    measures=(*SIMULATION, "moesched/cli", "moesched/planner"),
    parts=[command.line for command in COMMANDS],
    rounds=5,
    rounds_help="runs of each command",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all commands and write what they took."""
    options = BENCHMARK.parse(arguments)
    chosen = [command for command in COMMANDS if command.line in options.only]
    rows = [timed(command, options.rounds) for command in track(chosen, "running commands", still=True)]
    BENCHMARK.write({"commands": rows})


def timed(command: Command, runs: int) -> dict[str, object]:
    """One command, several times."""
    seconds = [once(command.line) for _ in range(runs)]
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
