"""A sweep of 1,000 points: is it sooner done on two cores, and does it lose or repeat points if it is killed?

It runs on one core and on two in turn, as the whole command, from its start to its end. The killed sweeps get SIGKILL
at random moments, several times each, and the same command goes on; in the end their lines are compared with those of
a sweep that nobody disturbed, apart from the time that each simulation took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of, times

CORES = (1, 2)
BAR = 1.7
KILLS = 5
"""Times that each sweep is killed."""

SECONDS_TO_VANISH = 5.0
MARK = "MOESCHED_BENCHMARK_CASE"
"""An environment variable that all processes of a case inherit."""

AXES = {
    "--model": "mixtral-0.8b",
    "--machine": "t4,l4",
    "--policy": "resident,cgopipe,layer_streaming,expert_cache,twiddler",
    "--batch-size": "1,2,3,4,5,6,7,8,9,10",
    "--gen": "2,3,4,5,6,7,8,9,10,11",
}
POINTS = 1_000


def claims(result: Result) -> Iterator[Claim]:
    """1,000 points on one core and on two, and killed in between."""
    cores, killed = result.get("cores"), result.get("killed")
    if cores is not None:
        each = f"{cores['points']:,} points of {cores['milliseconds_for_a_point']:.0f} ms"
        words = f"speed of a sweep of {each} on two cores, over one core"
        yield Claim(words, times(cores["ratio"]), f"≥ {times(cores['bar'])}", cores["ratio"] >= cores["bar"])
    if killed is not None:
        words = "sweeps killed five times and resumed that lose, repeat or change a point"
        yield none_of(words, len({each.split(":")[0] for each in killed["problems"]}), killed["sweeps"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    packages=("numpy",),
    claims=claims,
    parts=("cores", "killed"),
    rounds=5,
    rounds_help="sweeps on each number of cores, and sweeps that are killed",
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both parts, print what fell short, write the result; 1 where one did."""
    options = BENCHMARK.parse(arguments)
    figures = {part: BENCHMARK.stored()[part] for part in BENCHMARK.parts if part in BENCHMARK.stored()}
    parts = {"cores": on_cores, "killed": killed}
    with TemporaryDirectory() as folder:
        for part in options.only:
            figures[part] = parts[part](Path(folder), options.rounds)
    return BENCHMARK.write(figures)


def on_cores(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of the whole command on one core and on two, in turn."""
    seconds: dict[str, list[float]] = {str(cores): [] for cores in CORES}
    for number in track(range(rounds), "sweeping", still=True):
        for cores in CORES:
            begun = time.perf_counter()
            end(start(folder / f"{number}-{cores}.jsonl", cores))
            seconds[str(cores)].append(round(time.perf_counter() - begun, 3))
    one, two = (median(seconds[str(cores)]) for cores in CORES)
    return {
        "points": POINTS,
        "ratio": round(one / two, 3),
        "bar": BAR,
        "milliseconds_for_a_point": round(1e3 * one / POINTS, 2),
        "seconds": seconds,
    }


def killed(folder: Path, rounds: int) -> dict[str, Any]:
    """Sweeps that are killed and go on, beside an undisturbed one."""
    begun = time.perf_counter()
    whole = folder / "whole.jsonl"
    end(start(whole, max(CORES)))
    seconds = time.perf_counter() - begun
    problems = []
    for number in track(range(rounds), "killing"):
        found = kill_and_resume(folder / f"killed-{number}.jsonl", whole, Random(number), seconds)
        problems += [f"round {number}: {each}" for each in found]
    return {"points": POINTS, "sweeps": rounds, "kills": rounds * KILLS, "problems": problems}


def kill_and_resume(out: Path, whole: Path, random: Random, seconds: float) -> list[str]:
    """Kill a sweep at random moments, let it go on each time; returns what went wrong."""
    problems = []
    for _ in range(KILLS):
        before = whole_lines(out)
        process = start(out, max(CORES))
        time.sleep(random.uniform(0.0, 1.5 * seconds / KILLS))
        process.kill()
        process.communicate()
        if whole_lines(out)[: len(before)] != before:
            problems.append("lines changed or vanished")
        if left := processes_left(out):
            problems.append(f"{left} processes stayed")
    before = whole_lines(out)
    said = end(start(out, max(CORES)))
    if said["reused"] != len(before):
        problems.append(f"{len(before)} points were done, and {said['reused']} were taken over")
    if whole_lines(out)[: len(before)] != before or len(whole_lines(out)) != POINTS:
        problems.append(f"{len(whole_lines(out))} lines in the end")
    if contents(out) != contents(whole):
        problems.append("other results than undisturbed")
    return problems


def start(out: Path, cores: int) -> subprocess.Popen[bytes]:
    """Start the sweep on some of the cores."""
    usable = sorted(os.sched_getaffinity(0))[:cores]
    command = [sys.executable, "-m", "moesched", "sweep", *(word for pair in AXES.items() for word in pair)]
    return subprocess.Popen(
        [*command, "--out", str(out), "--json"],
        env=os.environ | {MARK: str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, usable),
    )


def end(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait for the end of a sweep; returns what it said."""
    said, _ = process.communicate()
    found: dict[str, Any] = json.loads(said)
    if process.returncode or (found["done"], found["failed"]) != (POINTS, 0):
        raise SystemExit(f"the sweep fails by itself: {found['done']} points, {found['failures'][:1]}")
    return found


def whole_lines(out: Path) -> list[bytes]:
    """The lines of a file that are complete."""
    data = out.read_bytes() if out.exists() else b""
    return data.split(b"\n")[:-1]


def contents(out: Path) -> dict[str, Any]:
    """The results of a file by key, without the time that the simulations took."""
    lines = [json.loads(line) for line in whole_lines(out)]
    assert len({line["key"] for line in lines}) == len(lines), "a key comes twice"
    return {line["key"]: {**line, "wall_seconds": 0} for line in lines}


def processes_left(out: Path) -> int:
    """Processes of a case that have not ended in time."""
    deadline = time.monotonic() + SECONDS_TO_VANISH
    while True:
        count = sum(is_of(process, out) for process in psutil.process_iter())
        if not count or time.monotonic() > deadline:
            return count
        time.sleep(0.05)


def is_of(process: psutil.Process, out: Path) -> bool:
    try:
        return bool(process.environ().get(MARK) == str(out) and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main())
