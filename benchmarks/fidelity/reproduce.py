"""Predict the tables and figures of three papers, and compare them with what the papers print, cell by cell.

Everything is simulated, so that the figures depend on no machine. Each paper has a result of its own,
reproduce-PAPER.json. `moesched reproduce PAPER --only SECTION` does the same for one section, and draws the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from benchmarks.fidelity._paper_tables import tables
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of, at_most
from moesched.reproduce import PAPERS, reproduce_paper


def claims(result: Result) -> Iterator[Claim]:
    """A paper's tables beside ours."""
    found = [claim for section in result["sections"] for claim in section["claims"]]
    agree = sum(claim["agrees"] for claim in found)
    reasons = sum(claim["agrees"] and bool(claim["because"]) for claim in found)
    words = f"{result['paper']}: statements of the paper that agree"
    yield all_of(f"{words}, {reasons} of them by construction or by errors that cancel", agree, len(found))
    accuracy = result["accuracy"]
    if accuracy is not None:
        words = f"moe-lightning: median error of {accuracy['cells']} predicted cells"
        yield at_most(words, 100 * accuracy["median_error"], 20.0, "{:.1f} %")
        pairs = accuracy["pairs"]
        yield all_of(
            "moe-lightning: pairs of cells in the paper's order", pairs - len(accuracy["wrong"]), pairs
        )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=PAPERS,
    rounds_help="computations of each paper; all must agree",
    by_machine=False,
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and write paper by paper."""
    options = BENCHMARK.parse(arguments)
    for paper in track(options.only, "reproducing"):
        first, *others = (reproduce_paper(paper) for _ in range(options.rounds))
        if any(replace(other, wall_seconds=first.wall_seconds) != first for other in others):
            raise SystemExit(f"{paper}: two computations differ")
        out = BENCHMARK.out.with_name(f"{BENCHMARK.out.stem}-{paper}.json")
        BENCHMARK.write(msgspec.to_builtins(first), out, [paper])


if __name__ == "__main__":
    main()
