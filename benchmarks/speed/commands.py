"""Time and memory of commands from start to end, Python's own start included: each run is a process of its own.

`explain` reads traces of about 100,000 tasks: of a fixed graph, of one with many edges for each task, and of a policy
that decides and keeps caches.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most

MTBENCH = "--model mixtral-8x7b --machine t4 --workload mtbench"
TRACES = {
    "few_edges.json": "--policy cgopipe --batch-size 64 --gen 130",
    "many_edges.json": "--policy cgopipe --batch-size 256 --micro-batch-size 8 --gen 14",
    "caches.json": "--policy lru_offload --batch-size 8 --gen 150",
}


class Bar(NamedTuple):
    """The most that a command may take."""

    seconds: float
    nbytes: float | None = None


COMMANDS = {
    "--help": None,
    "list policies": None,
    f"plan {MTBENCH} --gen 128": Bar(8.0),
    f"simulate {MTBENCH} --gen 128 --policy cgopipe --requests 8192": Bar(60.0),
    **{f"explain {trace} --json": Bar(5.0, 1e9) for trace in TRACES},
}


def claims(result: Result) -> Iterator[Claim]:
    """Commands that have a bar."""
    for each in result["commands"]:
        words = f"`moesched {' '.join(each['command'].split()[1:3])}`"
        if each["bar"]:
            seconds, nbytes = each["bar"]
            yield at_most(f"{words}: from start to end", each["seconds"], seconds, "{:.1f} s")
            if nbytes:
                yield at_most(f"{words}: memory", each["peak_bytes"] / 1e6, nbytes / 1e6, "{:,.0f} MB")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=COMMANDS,
    rounds=5,
    rounds_help="runs of each command; medians count",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write traces, run all commands, and write what they took."""
    options = BENCHMARK.parse(arguments)
    with TemporaryDirectory() as folder:
        for trace, words in TRACES.items():
            if any(trace in line for line in options.only):
                run(f"simulate {MTBENCH} {words} --trace {trace}", Path(folder))
        rows = [
            measured(line, options.rounds, Path(folder))
            for line in track(options.only, "running commands", still=True)
        ]
    return BENCHMARK.write({"commands": rows})


def measured(line: str, rounds: int, folder: Path) -> dict[str, Any]:
    """The median time and the most memory of a command."""
    runs = [run(line, folder) for _ in range(rounds)]
    return {
        "command": f"moesched {line}",
        "seconds": round(median(seconds for seconds, _ in runs), 3),
        "peak_bytes": max(peak for _, peak in runs),
        "bar": COMMANDS[line],
    }


def run(line: str, folder: Path) -> tuple[float, int]:
    """Seconds and the most bytes of one process.

    Raises:
        SystemExit: the command failed.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "moesched", *line.split()], cwd=folder, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"`moesched {line}` ended with code {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
