"""Time and memory of `moesched explain` on a trace of about 100,000 tasks, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from _options import SIMULATION, Benchmark, track

RUNS = {
    "cgopipe, 3 micro-batches": "--policy cgopipe --batch-size 64 --gen 130",
    "cgopipe, 32 micro-batches": "--policy cgopipe --batch-size 256 --micro-batch-size 8 --gen 14",
    "lru_offload": "--policy lru_offload --batch-size 8 --gen 150",
}
"""A fixed graph, one with many edges for each task, and a policy that decides and keeps caches."""
BAR_SECONDS, BAR_BYTES = 5.0, 1e9

BENCHMARK = Benchmark(
    __doc__,
    "explaining",
    measures=(*SIMULATION, "moesched/analysis", "moesched/trace", "moesched/cli/explain.py"),
    parts=RUNS,
    rounds=5,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain the trace of each run, and write what it took."""
    options = BENCHMARK.parse(arguments)
    results = [explained(name, options.rounds) for name in track(options.only, "explaining", still=True)]
    for each in results:
        print(
            f"{each['run']}: {each['tasks']:,} tasks, {each['trace_bytes'] / 1e6:.0f} MB: "
            f"{each['seconds']:.2f} s, {each['peak_bytes'] / 1e6:.0f} MB"
        )
    BENCHMARK.write({"bar_seconds": BAR_SECONDS, "bar_bytes": BAR_BYTES, "runs": results})
    return int(any(each["seconds"] > BAR_SECONDS or each["peak_bytes"] > BAR_BYTES for each in results))


def explained(name: str, rounds: int) -> dict[str, Any]:
    """The median time and the highest memory of the command."""
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        write_trace(name, trace)
        found = [explain(trace) for _ in range(rounds)]
        return {
            "run": name,
            "tasks": found[0]["tasks"],
            "trace_bytes": trace.stat().st_size,
            "seconds": round(median(each["seconds"] for each in found), 3),
            "peak_bytes": max(each["peak_bytes"] for each in found),
        }


def write_trace(name: str, trace: Path) -> None:
    """Simulate Mixtral 8x7B on a T4."""
    command = "simulate --model mixtral-8x7b --machine t4 --workload mtbench"
    run = [sys.executable, "-m", "moesched", *command.split(), *RUNS[name].split(), "--trace", str(trace)]
    subprocess.run(run, capture_output=True, check=True)


def explain(trace: Path) -> dict[str, Any]:
    """Run the command once."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "moesched", "explain", str(trace), "--json"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    told = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"`moesched explain {trace}` ended with status {status}")
    return {"tasks": told["tasks"], "seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    raise SystemExit(main())
