"""Compare the engine's speed with an older commit's, row by row and in turns.

Each tree has a process, which measures a row when it is told to; the two take turns within a round, and the one that
goes first changes from round to round. Both are started anew for every row and every five rounds. Both simulate the
same graph: this tree's size of pages and its machine. A row's figure is the median over the rounds of (microseconds per
task now / before), with a bootstrap interval of 95 %: 1.03 is 3 % slower.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.record.results import ROOT
from benchmarks.shared.older_tree import checkout, prepared
from benchmarks.shared.pairs import Pairs, compared, starts_of
from benchmarks.speed.engine import MACHINE, PAGE_BYTES, REAL, VIRTUAL

PROBE = Path(__file__).with_name("_engine_probe.py")


class Tree:
    """The process that measures one tree."""

    def __init__(self, folder: Path) -> None:
        paths = os.pathsep.join([str(folder), str(folder / "benchmarks")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROBE), str(PAGE_BYTES), MACHINE],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, row: str) -> float:
        """Microseconds per task."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(row, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def claims(result: Result) -> Iterator[Claim]:
    """The engine's speed beside an older commit's."""
    slower = sum(row["interval"][0] > 1.03 for row in result["rows"].values())
    words = f"engine beside commit {result['before']}: rows surely more than 3 % slower"
    yield none_of(words, slower, len(result["rows"]))


ROWS = [row for row in (*VIRTUAL, *REAL) if row != "simpy"]
BENCHMARK = Benchmark(
    __file__, __doc__, claims=claims, parts=ROWS, rounds=15, rounds_help="rounds of each row"
)
BENCHMARK.parser.add_argument("before", nargs="?", default="HEAD", help="the older commit (default: HEAD)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns, print a line for each row, and return 1 if one is surely more than 3 % slower."""
    options = BENCHMARK.parse(arguments)
    pairs: dict[str, list[Pairs]] = {row: [] for row in options.only}
    with checkout(options.before) as old, prepared(ROOT) as new:
        for numbers, row in track(
            [*product(starts_of(options.rounds), options.only)], "measuring", still=True
        ):
            pairs[row].append(measured_in_turns(Tree(old), Tree(new), row, numbers))
    figures = {row: compared(pairs[row]) for row in options.only}
    for row, figure in figures.items():
        low, high = figure.interval
        print(f"{row:40} {figure.ratio:.3f}  ({low:.3f} to {high:.3f})")
    return BENCHMARK.write(
        {"before": options.before, "rows": {row: figure._asdict() for row, figure in figures.items()}}
    )


def measured_in_turns(before: Tree, after: Tree, row: str, numbers: Iterable[int]) -> Pairs:
    """A row's figures in some rounds, from two processes that are warmed up by it once, and then closed."""
    pairs = []
    for tree in (before, after):
        tree.measure(row)
    for number in numbers:
        turns = (before, after) if number % 2 else (after, before)
        measured = {tree: tree.measure(row) for tree in turns}
        pairs.append((measured[before], measured[after]))
    for tree in (before, after):
        tree.close()
    return pairs


if __name__ == "__main__":
    sys.exit(main())
