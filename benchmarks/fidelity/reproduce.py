"""Predict the tables and figures of three papers, and compare them with what the papers print, cell by cell.

Everything is simulated, so that the figures depend on no machine. Each paper has a result of its own,
reproduce-PAPER.json; a part is a section of one, and sections that are not chosen stay as they are.
`moesched reproduce PAPER` does the same for one paper, and draws the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from benchmarks.fidelity._paper_tables import tables
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of, at_most
from benchmarks.record.results import stored
from moesched.reproduce import PAPERS, SECTIONS, Reproduction, reproduce_paper

PARTS = {paper: {f"{paper}/{section}": section for section in SECTIONS[paper]} for paper in PAPERS}
"""Sections by the names of their parts, by paper."""


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
    parts=[part for parts in PARTS.values() for part in parts],
    rounds_help="computations of each paper; all must agree",
    by_machine=False,
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and write paper by paper."""
    options = BENCHMARK.parse(arguments)
    for paper in track([paper for paper in PAPERS if PARTS[paper].keys() & options.only], "reproducing"):
        parts = PARTS[paper]
        chosen = [section for part, section in parts.items() if part in options.only]
        first, *others = (reproduce_paper(paper, chosen) for _ in range(options.rounds))
        if any(figures(other) != figures(first) for other in others):
            raise SystemExit(f"{paper}: two computations differ")
        found = msgspec.to_builtins(first)
        out = BENCHMARK.out.with_name(f"{BENCHMARK.out.stem}-{paper}.json")
        whole = len(chosen) == len(parts)
        BENCHMARK.write(found if whole else within(stored(out), found, SECTIONS[paper]), out, list(parts))


def figures(found: Reproduction) -> Reproduction:
    """A reproduction without the time that it took."""
    return msgspec.structs.replace(found, wall_seconds=0.0)


def within(older: dict[str, Any], found: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A result with some sections computed anew, in the paper's order; the time is that of the whole.

    Raises:
        SystemExit: the rates that all sections share changed.
    """
    if older and older["calibration"] != found["calibration"]:
        raise SystemExit(f"{found['paper']}: its rates changed; choose all of its sections")
    sections = {each["name"]: each for each in [*older.get("sections", []), *found["sections"]]}
    shared = {name: value for name, value in {**found, **older}.items() if name in found}
    accuracies = {
        name: value for name, value in found.items() if name.startswith("accuracy") and value is not None
    }
    return {**shared, **accuracies, "sections": [sections[name] for name in names if name in sections]}


if __name__ == "__main__":
    main()
