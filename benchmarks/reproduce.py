"""Predict the tables and figures of three papers, and compare them with what the papers print, cell by cell.

Everything is simulated, so that the figures depend on no machine. Each paper has a result of its own,
reproduce-PAPER.json. `moesched reproduce PAPER` does the same for one paper, and draws the pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from _options import SIMULATION, Benchmark, track

from moesched.reproduce import PAPERS, Reproduction, reproduce

BENCHMARK = Benchmark(
    __doc__,
    "reproduce",
    measures=("moesched/reproduce", "moesched/planner", "moesched/cluster", *SIMULATION),
    parts=PAPERS,
    rounds_help="computations of each paper; all must agree",
    by_machine=False,
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and write paper by paper."""
    options = BENCHMARK.parse(arguments)
    out = BENCHMARK.out
    for paper in track(options.only, "reproducing"):
        first, *others = (reproduce(paper) for _ in range(options.rounds))
        if any(figures(other) != figures(first) for other in others):
            raise SystemExit(f"{paper}: two computations differ")
        BENCHMARK.write(msgspec.to_builtins(first), out.with_name(f"{out.stem}-{paper}.json"))


def figures(found: Reproduction) -> Reproduction:
    """A reproduction without the time that it took."""
    return msgspec.structs.replace(found, wall_seconds=0.0)


if __name__ == "__main__":
    main()
