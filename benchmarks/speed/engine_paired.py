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
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.record.results import ROOT
from benchmarks.shared.older_tree import checkout, prepared
from benchmarks.shared.pairs import Pairs, compared_rows, in_turns, starts_of
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
    turns = [*product(starts_of(options.rounds), options.only)]
    with checkout(options.before) as old, prepared(ROOT) as new:
        for rounds, row in track(turns, "measuring", still=True):
            with closing(Tree(old)) as before, closing(Tree(new)) as now:
                pairs[row].append(in_turns(Tree.measure, before, now, [row], rounds)[row])
    return BENCHMARK.write({"before": options.before, "rows": compared_rows(pairs)})


if __name__ == "__main__":
    sys.exit(main())
