"""Runs every policy on imitated GPUs that lag, overtake each other, fail and drift, in every way that a batch can run.

Parts are questions:

- bits: does a batch have the bits of the CPU, within its plan's bytes, with a valid trace?
- families: have models of other families the bits of the CPU, too, on one GPU and on several nodes?
- batches: is the memory the same after each of three batches?
- errors: does an error at a random piece of work, on any stream, end the run in time, with its story, nothing left?
- ledger: does a GPU suffice whose free memory gives just the plan, by an allocator that rounds up as torch's does?
- spans: do the times of ten minutes fit each other, on clocks that drift?
- deep: does a run of 32 layers, 32 micro-batches and 16 steps end, and is little remembered?

Each case is a process of its own, which is ended if it hangs. The result is written after each question. With
`--minutes` a question ends early, and its row tells what was done: it holds only where that is all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, NamedTuple

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, together
from benchmarks.robustness._lagging_rows import FAMILIES, Answer, answer
from benchmarks.robustness._lagging_runs import CASES, WAYS, Case
from benchmarks.shared.fresh_process import RowFailed, in_fresh_process, preload

WHOLE = "whole prompts"
OTHER_WAYS = 10
"""Divisor of the seeds of prompts in chunks, beams, ranks and so on."""
A_PROCESS = 20
"""Seeds that one process tries."""
SECONDS = 1200
"""Time after which a process counts as hanging."""
IN_WORDS = {
    "bits": "runs by seeds",
    "families": "runs of other families",
    "batches": "batches with the same memory",
    "errors": "errors that end a run",
    "ledger": "plans that fit",
    "spans": "times ten minutes of spans",
    "deep": "runs of 32 layers and micro-batches",
}


def claims(result: Result) -> Iterator[Claim]:
    """Every policy on imitated GPUs."""
    rows = {IN_WORDS[name]: row for name, row in result["rows"].items()}
    claims = [
        Claim(
            "",
            f"{row['done']:,}{' with faults' if row.get('problems') else ''}",
            f"{row['planned']:,}",
            row["holds"],
        )
        for row in rows.values()
    ]
    yield together(f"every policy on imitated GPUs, without a fault: {', '.join(rows)}", *claims)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=IN_WORDS,
    rounds=200,
    rounds_help="seeds of each policy, a tenth of them in each other way; errors are 2.5 times as many",
    by_machine=False,
    keeps_parts=True,
)
BENCHMARK.parser.add_argument(
    "--minutes",
    type=float,
    default=float("inf"),
    metavar="N",
    help="begin no process of a question later than this (default: do all)",
)
BENCHMARK.parser.add_argument(
    "--processes", type=int, default=1, metavar="N", help="processes at a time (default: 1)"
)


class Unit(NamedTuple):
    """Work of one process: `number` seeds, errors or batches of a case, starting at `first`."""

    question: str
    case: Case
    first: int
    number: int

    def answer(self, until: float) -> Answer | None:
        """The answer of the process; None where it is too late to begin."""
        if time.monotonic() > until:
            return None
        asked = self.question, self.case.name, self.first, self.number
        try:
            found: Answer = in_fresh_process(answer, *asked, seconds=SECONDS)
        except RowFailed as error:
            return Answer([str(error)])
        return found


def units_of(question: str, rounds: int) -> list[Unit]:
    """The processes that answer a question, in an order in which any number of the first ones has some of each kind."""
    whole = [case for case in CASES if case.way == WHOLE]
    if question == "bits":
        few = max(1, rounds // OTHER_WAYS)
        return [
            Unit(question, case, first, min(A_PROCESS, seeds - first))
            for first in range(0, rounds, A_PROCESS)
            for case in CASES
            if (seeds := rounds if case.way == WHOLE else few) > first
        ]
    if question == "errors":
        wanted = max(1, rounds * 5 // 2)
        bounds = [wanted * place // len(CASES) for place in range(len(CASES) + 1)]
        spans = zip(CASES, bounds, bounds[1:], strict=False)
        units = [Unit(question, case, first, end - first) for case, first, end in spans if end > first]
        Random(0).shuffle(units)
        return units
    whole_models = [case for case in CASES if WAYS[case.way].ranks == 1]
    return {
        "families": [Unit(question, case, 0, len(FAMILIES)) for case in whole_models],
        "batches": [Unit(question, case, 1, 3) for case in CASES],
        "ledger": [Unit(question, case, 0, max(1, rounds // 100)) for case in whole],
        "spans": [Unit(question, whole[0], 0, max(1, rounds // 10))],
        "deep": [Unit(question, case, 1, 1) for case in whole],
    }[question]


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask all questions, and write the row of each; 1 where a row does not hold."""
    options = BENCHMARK.parse(arguments)
    preload("benchmarks.robustness._lagging_rows")
    rows: dict[str, Any] = BENCHMARK.stored().get("rows", {})
    for question in options.only:
        units = units_of(question, options.rounds)
        until = time.monotonic() + 60 * options.minutes
        with ThreadPoolExecutor(options.processes) as pool:
            answers = [*track(pool.map(lambda unit, until=until: unit.answer(until), units), question)]
        rows[question] = row_of(units, answers)
        BENCHMARK.done(question)
        BENCHMARK.write({"rows": rows})
    return int(not all(rows[question]["holds"] for question in options.only))


def row_of(units: Sequence[Unit], answers: Sequence[Answer | None]) -> dict[str, Any]:
    """The cases planned and done, the problems, and the most of each figure."""
    known = [(unit, found) for unit, found in zip(units, answers, strict=True) if found is not None]
    problems = [f"{unit.case.name}, {unit.first}: {each}" for unit, found in known for each in found.problems]
    names = {name for _, found in known for name in found.most}
    return {
        "done": sum(unit.number for unit, _ in known),
        "planned": sum(unit.number for unit in units),
        "problems": problems[:20],
        "most": {name: max(found.most.get(name, 0) for _, found in known) for name in sorted(names)},
        "holds": not problems and len(known) == len(units),
    }


if __name__ == "__main__":
    raise SystemExit(main())
