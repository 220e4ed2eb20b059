"""MLX: evaluations for a token of a 40-layer toy DBRX on two nodes, and its time beside an older commit's.

Both nodes are in one process. Each tree has a process, and the cases take turns. "before" is the older commit, which
evaluates every task; the tokens of all cases have to be equal. The speed-up is the median over the rounds of (time
before / time now).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from _mlx_nodes import CASES, TOY_DBRX
from _options import Benchmark, track
from _results import ROOT
from same_behaviour import checkout

from moesched.models.random_model import write_random_model

PROBE = ROOT / "benchmarks" / "_mlx_nodes.py"
EVERY_TASK = "3a45be7"
"""The last commit whose MLX device evaluates every task."""

BENCHMARK = Benchmark(
    __doc__,
    "mlx_evaluations",
    measures=("devices/mlx", "benchmarks/_mlx_nodes.py"),
    packages=("mlx",),
    parts=CASES,
    rounds=9,
)
BENCHMARK.parser.add_argument("--before", default=EVERY_TASK, metavar="COMMIT", help="the older commit")
BENCHMARK.parser.add_argument("--new-tokens", type=int, default=24, metavar="N")


class Tree:
    """The process that runs the cases of one tree."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROBE), str(model)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "benchmarks")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, case: str, new_tokens: int) -> dict[str, Any]:
        """The figures of one case."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([case, new_tokens]), file=self._process.stdin, flush=True)
        figures: dict[str, Any] = json.loads(self._process.stdout.readline())
        return figures

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases in turn, print them, write the result."""
    options = BENCHMARK.parse(arguments)
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in options.only}
    with TemporaryDirectory() as name, checkout(options.before) as old:
        model = Path(name) / TOY_DBRX.name
        write_random_model(TOY_DBRX, model, dtype="float32")
        now, before = Tree(ROOT, model), Tree(old, model)
        for _ in track(range(options.rounds), "rounds", still=True):
            for case, made in runs.items():
                tree = before if case == "before" else now
                made.append(tree.measure(case, options.new_tokens))
        now.close()
        before.close()
    tokens = [run["tokens"] for made in runs.values() for run in made]
    if any(each != tokens[0] for each in tokens):
        sys.exit("the cases give different tokens")
    figures = {case: _figures(made, runs.get("before", made)) for case, made in runs.items()}
    for case, figure in figures.items():
        print(f"{case:14}", *(f"{name} {value}" for name, value in figure.items()))
    BENCHMARK.write({"before": options.before, "new_tokens": options.new_tokens, "cases": figures})


def _figures(runs: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> dict[str, float]:
    ratios = [old["seconds"] / run["seconds"] for old, run in zip(before, runs, strict=True)]
    return {
        "evaluations_per_token": median(run["evaluations"] for run in runs),
        "milliseconds_per_token": round(1000 * median(run["seconds"] for run in runs), 2),
        "speedup": round(median(ratios), 3),
        "least_speedup": round(min(ratios), 3),
    }


if __name__ == "__main__":
    main()
