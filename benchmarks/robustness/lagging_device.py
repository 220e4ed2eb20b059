"""Runs every policy on imitated GPUs that lag, overtake each other, fail and drift, in every way that a batch can run.

Parts are questions:

- bits: does a batch have the bits of the CPU, within its plan's bytes, with a valid trace?
- batches: is the memory the same after each of three batches?
- errors: does an error at a random piece of work, on any stream, end the run in time, with its story, nothing left?
- ledger: does a GPU suffice whose free memory gives just the plan, by an allocator that rounds up as torch's does?
- spans: do the times of ten minutes fit each other, on clocks that drift?
- deep: does a run of 32 layers, 32 micro-batches and 16 steps end, and is little remembered?

Each case is a process of its own, which is ended if it hangs. Cases that are done stay in a file below out/, so that a
run that was cut off goes on where it was. With `--minutes` a question ends early, and its row tells what was done: it
holds only where that is all.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, together
from benchmarks.record.code import hash_of, imported
from benchmarks.record.results import ROOT
from benchmarks.robustness._lagging_rows import tell
from benchmarks.robustness._lagging_runs import CASES, Case

PROCESSES = get_context("forkserver")
"""Processes begin with torch loaded."""
PROCESSES.set_forkserver_preload(["benchmarks.robustness._lagging_rows"])
WHOLE = "whole prompts"
OTHER_WAYS = 10
"""Divisor of the seeds of prompts in chunks, beams, ranks and so on."""
A_PROCESS = 20
"""Seeds that one process tries."""
SECONDS = 1200
"""Time after which a process counts as hanging."""


IN_WORDS = {
    "bits": "runs by seeds",
    "batches": "batches with the same memory",
    "errors": "errors that end a run",
    "ledger": "plans that fit",
    "spans": "times ten minutes of spans",
    "deep": "runs of 32 layers and micro-batches",
}


def claims(result: Result) -> Iterator[Claim]:
    """Every policy on imitated GPUs."""
    rows = {IN_WORDS[name]: row for name, row in result["rows"].items()}
    words = f"every policy on imitated GPUs, without a fault: {', '.join(rows)}"
    claims = [
        Claim(
            "", f"{row['done']:,}{'' if row['good'] else ' with faults'}", f"{row['planned']:,}", row["holds"]
        )
        for row in rows.values()
    ]
    yield together(words, *claims)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    packages=("torch",),
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

    @property
    def name(self) -> str:
        """Its key in the file of what is done."""
        return f"{self.question}, {self.case.name}, {self.first}, {self.number}"


def units_of(question: str, rounds: int) -> list[Unit]:
    """The processes that answer a question, in an order in which any number of the first ones has some of each kind."""
    whole = [case for case in CASES if case.way == WHOLE]
    few = max(1, rounds // OTHER_WAYS)
    if question == "bits":
        return [
            Unit(question, case, first, min(A_PROCESS, seeds - first))
            for first in range(0, rounds, A_PROCESS)
            for case in CASES
            if (seeds := rounds if case.way == WHOLE else few) > first
        ]
    if question == "errors":
        wanted = max(1, rounds * 5 // 2)
        bounds = [wanted * place // len(CASES) for place in range(len(CASES) + 1)]
        units = [
            Unit(question, case, first, end - first)
            for case, first, end in zip(CASES, bounds, bounds[1:], strict=False)
            if end > first
        ]
        Random(0).shuffle(units)
        return units
    if question == "batches":
        return [Unit(question, case, 1, 3) for case in CASES]
    if question == "ledger":
        return [Unit(question, case, 0, max(1, rounds // 100)) for case in whole]
    if question == "spans":
        return [Unit(question, whole[0], 0, max(1, rounds // 10))]
    return [Unit(question, case, 1, 1) for case in whole]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all processes that are not done yet, print the rows, write the JSON; 1 where a row does not hold."""
    options = BENCHMARK.parse(arguments)
    done = Done(ROOT / "out" / f"{BENCHMARK.out.stem}.done.json")
    rows = BENCHMARK.stored().get("rows", {})
    for question in options.only:
        units = units_of(question, options.rounds)
        until = time.monotonic() + (60 * options.minutes if options.minutes is not None else 1e9)
        missing = [unit for unit in units if unit.name not in done.answers]
        with ThreadPoolExecutor(options.processes) as pool:
            answers = pool.map(lambda unit, until=until: answer(unit, until), missing)
            for unit, found in zip(missing, track(answers, question), strict=False):
                if found is not None:
                    done.add(unit, found)
        known = [(unit, done.answers[unit.name]) for unit in units if unit.name in done.answers]
        rows[question] = {
            "done": sum(unit.number for unit, _ in known),
            "planned": sum(unit.number for unit in units),
            **ROWS[question](known),
        }
        rows[question]["holds"] = rows[question]["good"] and len(known) == len(units)
        print(question, json.dumps(rows[question])[:2000], flush=True)
        BENCHMARK.write({"holds": all(row["holds"] for row in rows.values()), "rows": rows})
    return int(not all(rows[question]["holds"] for question in options.only))


class Done:
    """Answers that are known, in a file; of other sources they do not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hash_of(imported())
        known = json.loads(path.read_text()) if path.is_file() else {}
        self.answers: dict[str, Any] = known["answers"] if known.get("hash") == self._hash else {}

    def add(self, unit: Unit, found: dict[str, Any]) -> None:
        """Add an answer."""
        self.answers[unit.name] = found
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps({"hash": self._hash, "answers": self.answers}))


def answer(unit: Unit, until: float) -> dict[str, Any] | None:
    """Run one process; its answer, or what went wrong as `failed`; None where it is too late to begin."""
    if time.monotonic() > until:
        return None
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(
        target=tell, args=(sender, unit.question, unit.case.name, unit.first, unit.number)
    )
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            found: dict[str, Any] = receiver.recv()
            return found
        return {"failed": f"hangs: no end within {SECONDS} s"}
    except EOFError:
        process.join()
        return {"failed": f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


Answers = Sequence[tuple[Unit, dict[str, Any]]]


def _failed(answers: Answers) -> list[str]:
    return [f"{unit.name}: {found['failed']}" for unit, found in answers if "failed" in found]


def _all(answers: Answers, key: str) -> list[str]:
    return [f"{unit.name}: {each}" for unit, found in answers for each in found.get(key, ())]


def _good(answers: Answers) -> Iterable[dict[str, Any]]:
    return (found for _, found in answers if "failed" not in found)


def _bits(answers: Answers) -> dict[str, Any]:
    wrong, over, traces, faults = (
        _all(answers, key) for key in ("wrong", "over_budget", "trace_problems", "faults")
    )
    failed = _failed(answers)
    seeds: Counter[str] = Counter()
    for unit, found in answers:
        seeds[unit.case.name] += found.get("seeds", 0)
    return {
        "seeds": seeds.total(),
        "seeds_of_each_policy": min(seeds[case.name] for case in CASES if case.way == WHOLE),
        "seeds_of_each_policy_in_each_other_way": min(
            seeds[case.name] for case in CASES if case.way != WHOLE
        ),
        "other_bits": wrong,
        "over_budget": over,
        "trace_problems": traces,
        "faults_of_locked_memory": faults,
        "failed": failed,
        "good": not (wrong or over or traces or faults or failed),
    }


def _deep(answers: Answers) -> dict[str, Any]:
    failed, over = _failed(answers), _all(answers, "over_budget")
    by_policy = {unit.case.policy: found for unit, found in answers if "failed" not in found}
    good = not failed and not over and all(found["bounded"] for found in by_policy.values())
    return {"by_policy": by_policy, "failed": failed, "good": good}


def _batches(answers: Answers) -> dict[str, Any]:
    failed = _failed(answers)
    grown = {unit.name: found for unit, found in answers if "failed" not in found and not found["flat"]}
    return {"grown": grown, "failed": failed, "good": not failed and not grown}


def _errors(answers: Answers) -> dict[str, Any]:
    failed, problems = _failed(answers), _all(answers, "problems")
    slowest = max((found["slowest_seconds"] for found in _good(answers)), default=0.0)
    return {
        "errors": sum(found["errors"] for found in _good(answers)),
        "slowest_seconds": slowest,
        "problems": problems,
        "failed": failed,
        "good": not failed and not problems and slowest < 5,
    }


def _ledger(answers: Answers) -> dict[str, Any]:
    failed, over = _failed(answers), _all(answers, "over_budget")
    beyond = [found.get("most_beyond_plan", {}) for found in _good(answers)]
    most = (
        {name: max(each.get(name, 0.0) for each in beyond) for name in ("blocks", "segments")}
        if beyond
        else {}
    )
    return {"most_beyond_plan": most, "over_budget": over, "failed": failed, "good": not (failed or over)}


def _spans(answers: Answers) -> dict[str, Any]:
    failed, problems = _failed(answers), _all(answers, "problems")
    tasks = sum(found["tasks"] for found in _good(answers))
    return {
        "minutes": 10,
        "tasks": tasks,
        "problems": problems,
        "failed": failed,
        "good": not (failed or problems),
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
