"""Runs every policy on imitated GPUs that lag, overtake each other, fail and drift, in every way that a batch can run.

Parts are questions:

- bits: does a batch have the bits of the CPU, within its plan's bytes, with a valid trace?
- batches: is the memory the same after each of three batches?
- errors: does an error at a random piece of work, on any stream, end the run in time, with its story, nothing left?
- ledger: does a GPU suffice whose free memory gives just the plan, by an allocator that rounds up as torch's does?
- spans: do the times of ten minutes fit each other, on clocks that drift?
- deep: does a run of 32 layers, 32 micro-batches and 16 steps end, and is little remembered?

Each case is a process of its own, which is ended if it hangs. Cases that are done stay in a file below out/, so that a
run that was cut off goes on where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from _options import EXECUTION, Benchmark, track
from _results import ROOT, source_hash

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _lagging_runs import CASES, Case

PROGRAM = Path(__file__).parent / "_lagging_rows.py"
WHOLE = "whole prompts"
OTHER_WAYS = 10
"""Divisor of the seeds of prompts in chunks, beams, ranks and so on."""
A_PROCESS = 40
"""Seeds that one process tries."""
SECONDS = 1200
"""Time after which a process counts as hanging."""

MEASURES = (
    *EXECUTION,
    "benchmarks/_lagging_runs.py",
    "benchmarks/_lagging_rows.py",
    "benchmarks/_lagging_spans.py",
)
QUESTIONS = ("bits", "batches", "errors", "ledger", "spans", "deep")
BENCHMARK = Benchmark(
    __doc__,
    "lagging_device",
    measures=MEASURES,
    packages=("torch",),
    parts=QUESTIONS,
    rounds=200,
    rounds_help="seeds of each policy, a tenth of them in each other way; errors are 2.5 times as many",
    keeps_parts=True,
)
BENCHMARK.parser.add_argument(
    "--processes", type=int, default=1, metavar="N", help="processes at a time (default: 1)"
)


class Unit(NamedTuple):
    """What one process does: `number` seeds of a case, or errors, or batches, from a number on."""

    question: str
    case: Case
    first: int
    number: int

    @property
    def name(self) -> str:
        """Its key in the file of what is done."""
        return f"{self.question}, {self.case.name}, {self.first}, {self.number}"


def units_of(question: str, rounds: int) -> Iterator[Unit]:
    """The processes that answer a question."""
    whole = [case for case in CASES if case.way == WHOLE]
    few = max(1, rounds // OTHER_WAYS)
    if question == "bits":
        for case in CASES:
            seeds = rounds if case.way == WHOLE else few
            for first in range(0, seeds, A_PROCESS):
                yield Unit(question, case, first, min(A_PROCESS, seeds - first))
    elif question == "errors":
        wanted = max(1, rounds * 5 // 2)
        for place, case in enumerate(CASES):
            first, end = wanted * place // len(CASES), wanted * (place + 1) // len(CASES)
            if end > first:
                yield Unit(question, case, first, end - first)
    elif question == "batches":
        yield from (Unit(question, case, 1, 3) for case in CASES)
    elif question == "ledger":
        yield from (Unit(question, case, 0, max(1, rounds // 100)) for case in whole)
    elif question == "spans":
        yield Unit(question, whole[0], 0, max(1, rounds // 10))
    else:
        yield from (Unit(question, case, 1, 1) for case in whole)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all processes that are not done yet, print the rows, write the JSON; 1 where a row does not hold."""
    options = BENCHMARK.parse(arguments)
    done = Done(ROOT / "out" / f"{BENCHMARK.out.stem}.done.json")
    rows = BENCHMARK.stored().get("rows", {})
    for question in options.only:
        units = list(units_of(question, options.rounds))
        missing = [unit for unit in units if unit.name not in done.answers]
        with ThreadPoolExecutor(options.processes) as pool:
            answers = pool.map(answer, missing)
            for unit, found in zip(missing, track(answers, question), strict=False):
                done.add(unit, found)
        rows[question] = {
            "cases": len(units),
            **ROWS[question]([(unit, done.answers[unit.name]) for unit in units]),
        }
        print(question, json.dumps(rows[question])[:2000], flush=True)
    BENCHMARK.write({"holds": all(row["holds"] for row in rows.values()), "rows": rows})
    done.forget()
    return int(not all(rows[question]["holds"] for question in options.only))


class Done:
    """Answers that are known, in a file; of other sources they do not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = source_hash(MEASURES)
        known = json.loads(path.read_text()) if path.is_file() else {}
        self.answers: dict[str, Any] = known["answers"] if known.get("hash") == self._hash else {}

    def add(self, unit: Unit, found: dict[str, Any]) -> None:
        """Add an answer."""
        self.answers[unit.name] = found
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps({"hash": self._hash, "answers": self.answers}))

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def answer(unit: Unit) -> dict[str, Any]:
    """Run one process; its answer, or what went wrong as `failed`."""
    command = [sys.executable, str(PROGRAM), unit.question, unit.case.name, str(unit.first), str(unit.number)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"hangs: no end within {SECONDS} s"}
    if ran.returncode:
        return {"failed": (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1][:300]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


Answers = Sequence[tuple[Unit, dict[str, Any]]]


def _failed(answers: Answers) -> list[str]:
    return [f"{unit.name}: {found['failed']}" for unit, found in answers if "failed" in found]


def _all(answers: Answers, key: str) -> list[str]:
    return [f"{unit.name}: {each}" for unit, found in answers for each in found.get(key, ())]


def _good(answers: Answers) -> Iterable[dict[str, Any]]:
    return (found for _, found in answers if "failed" not in found)


def _bits(answers: Answers) -> dict[str, Any]:
    wrong, over, traces = (_all(answers, key) for key in ("wrong", "over_budget", "trace_problems"))
    failed = _failed(answers)
    return {
        "policies": len({unit.case.policy for unit, _ in answers}),
        "seeds": sum(found["seeds"] for found in _good(answers)),
        "seeds_of_a_policy": max(unit.first + unit.number for unit, _ in answers),
        "other_bits": wrong,
        "over_budget": over,
        "trace_problems": traces,
        "failed": failed,
        "holds": not (wrong or over or traces or failed),
    }


def _deep(answers: Answers) -> dict[str, Any]:
    failed, over = _failed(answers), _all(answers, "over_budget")
    by_policy = {unit.case.policy: found for unit, found in answers if "failed" not in found}
    holds = not failed and not over and all(found["bounded"] for found in by_policy.values())
    return {"by_policy": by_policy, "failed": failed, "holds": holds}


def _batches(answers: Answers) -> dict[str, Any]:
    failed = _failed(answers)
    grown = {unit.name: found for unit, found in answers if "failed" not in found and not found["flat"]}
    return {"grown": grown, "failed": failed, "holds": not failed and not grown}


def _errors(answers: Answers) -> dict[str, Any]:
    failed, problems = _failed(answers), _all(answers, "problems")
    slowest = max((found["slowest_seconds"] for found in _good(answers)), default=0.0)
    return {
        "errors": sum(found["errors"] for found in _good(answers)),
        "slowest_seconds": slowest,
        "problems": problems,
        "failed": failed,
        "holds": not failed and not problems and slowest < 5,
    }


def _ledger(answers: Answers) -> dict[str, Any]:
    failed, over = _failed(answers), _all(answers, "over_budget")
    beyond = [found.get("most_beyond_plan", {}) for found in _good(answers)]
    most = (
        {name: max(each.get(name, 0.0) for each in beyond) for name in ("blocks", "segments")}
        if beyond
        else {}
    )
    return {"most_beyond_plan": most, "over_budget": over, "failed": failed, "holds": not (failed or over)}


def _spans(answers: Answers) -> dict[str, Any]:
    failed, problems = _failed(answers), _all(answers, "problems")
    tasks = sum(found["tasks"] for found in _good(answers))
    return {
        "minutes": 10,
        "tasks": tasks,
        "problems": problems,
        "failed": failed,
        "holds": not (failed or problems),
    }


ROWS = {
    "bits": _bits,
    "batches": _batches,
    "errors": _errors,
    "ledger": _ledger,
    "spans": _spans,
    "deep": _deep,
}


if __name__ == "__main__":
    raise SystemExit(main())
