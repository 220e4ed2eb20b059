"""Time and memory of commands from start to end, Python's own start included: each run is a process of its own.

`explain` reads traces of about 100,000 tasks: of a fixed graph, of one with many edges for each task, and of a policy
that decides and keeps caches. A sweep of 1,000 points runs on one core and on two, in turn with the other commands.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_least, at_most

MTBENCH = "--model mixtral-8x7b --machine t4 --workload mtbench"
TRACES = {
    "few_edges.json": "--policy cgopipe --batch-size 64 --gen 130",
    "many_edges.json": "--policy cgopipe --batch-size 256 --micro-batch-size 8 --gen 14",
    "caches.json": "--policy lru_offload --batch-size 8 --gen 150",
}


SWEEP = (
    "sweep --model mixtral-0.8b --machine t4,l4 --policy resident,cgopipe,layer_streaming,expert_cache,twiddler"
    " --batch-size 1,2,3,4,5,6,7,8,9,10 --gen 2,3,4,5,6,7,8,9,10,11 --json"
)
ON_CORES = {"sweep, one core": 1, "sweep, two cores": 2}
LEAST_SPEEDUP = 1.7


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
    **dict.fromkeys(ON_CORES),
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
    seconds = {each["command"].removeprefix("moesched "): each["seconds"] for each in result["commands"]}
    if seconds.keys() >= ON_CORES.keys():
        one, two = (seconds[name] for name in ON_CORES)
        words = f"speed of a sweep of 1,000 points of {one:.0f} ms on two cores, over one core"
        yield at_least(words, one / two, LEAST_SPEEDUP, "{:.2f}x")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=COMMANDS,
    rounds=5,
    rounds_help="runs of each command, in turn; medians count",
    replaces=("sweeps",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write traces, run all commands, and write what they took."""
    options = BENCHMARK.parse(arguments)
    with TemporaryDirectory() as folder:
        for trace, words in TRACES.items():
            if any(trace in line for line in options.only):
                run(f"simulate {MTBENCH} {words} --trace {trace}", Path(folder))
        runs: dict[str, list[tuple[float, int]]] = {line: [] for line in options.only}
        for line in track(options.only * options.rounds, "running commands", still=True):
            runs[line].append(run(line, Path(folder)))
    return BENCHMARK.write(
        {
            "commands": [
                {
                    "command": f"moesched {line}",
                    "seconds": round(median(seconds for seconds, _ in each), 3),
                    "peak_bytes": max(peak for _, peak in each),
                    "bar": COMMANDS[line],
                }
                for line, each in runs.items()
            ]
        }
    )


def run(line: str, folder: Path) -> tuple[float, int]:
    """Seconds and the most bytes of one process.

    Raises:
        SystemExit: the command failed.
    """
    out = folder / "sweep.jsonl"
    out.unlink(missing_ok=True)
    words, cores = (f"{SWEEP} --out {out}", ON_CORES[line]) if line in ON_CORES else (line, None)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "moesched", *words.split()],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        preexec_fn=partial(use_cores, cores) if cores else None,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"`moesched {words}` ended with code {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def use_cores(count: int) -> None:
    """Have this process run on some of its cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


if __name__ == "__main__":
    sys.exit(main())
