"""Random graphs and random policies, on the virtual clock and on real threads, on 1 to 3 ranks, a third with failures.

Half of the runs are random graphs on the virtual clock, three tenths are random graphs on worker threads, streams and
the event loop, and two tenths are policies (mostly the adversary) on random models and machines, on either. Tasks
compute on symbols that show what they were made from. Every run is checked: no wrong value, nothing stuck, no budget
passed physically, the ledger in order after every failure, nothing run after its input failed.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.robustness._random_graph import run_graph
from benchmarks.robustness._random_policy import run_policy
from benchmarks.robustness._random_program import Shape
from benchmarks.robustness._random_verdict import KINDS, Problem, Verdict
from benchmarks.shared.within import Stuck, within

STUCK_AFTER_SECONDS = 60.0


def claims(result: Result) -> Iterator[Claim]:
    """Random graphs and policies."""
    wrong = sum(each["runs"] for each in result["runs_with"].values())
    yield none_of("random runs with a wrong value, a hang or a broken rule", wrong, result["runs"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=[
        f"{what} {where}" for what in ("graph", "policy") for where in ("on the virtual clock", "on threads")
    ],
    rounds=10_000,
    rounds_help="runs, one by seed",
    by_machine=False,
)
BENCHMARK.parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    started = time.perf_counter()
    every = range(options.first, options.first + options.rounds)
    seeds = [seed for seed in every if kind_of_run(seed)[0] in options.only]
    counts: dict[str, Counter[str]] = {}
    problems: Counter[str] = Counter()
    told: list[str] = []
    for seed in track(seeds, "random runs"):
        name, shape = kind_of_run(seed)
        verdict = guarded(seed)
        counted = counts.setdefault(name, Counter())
        counted += Counter(runs=1, done=verdict.done, failed=verdict.failed, cancelled=verdict.cancelled)
        counted[f"{shape.ranks} ranks"] += 1
        counted["troubled"] += shape.troubled
        problems.update({problem.kind for problem in verdict.problems})
        told += [f"seed {seed}, {name}: {problem.kind}: {problem.what}" for problem in verdict.problems[:1]]
    return BENCHMARK.write(
        {
            "runs": len(seeds),
            "first_seed": options.first,
            "seconds": round(time.perf_counter() - started, 1),
            "runs_with": {
                kind: {"runs": problems[kind], "meaning": meaning} for kind, meaning in KINDS.items()
            },
            "by_kind": {name: dict(counted) for name, counted in sorted(counts.items())},
            "problems": told[:20],
        }
    )


def kind_of_run(seed: int) -> tuple[str, Shape]:
    """Kind of the run that a seed stands for."""
    kind = seed % 10
    shape = Shape(real=kind in (5, 6, 7, 9), ranks=1 + seed // 10 % 3, troubled=seed // 30 % 3 == 0)
    what = "policy" if kind >= 8 else "graph"
    return f"{what} {'on threads' if shape.real else 'on the virtual clock'}", shape


def random_run(seed: int) -> Verdict:
    """One run."""
    name, shape = kind_of_run(seed)
    run = run_policy if name.startswith("policy") else run_graph
    return run(Random(seed), shape)


def guarded(seed: int) -> Verdict:
    """One run, whatever comes of it."""
    try:
        return within(STUCK_AFTER_SECONDS, lambda: random_run(seed))
    except Stuck as error:
        return Verdict(problems=[Problem("stuck", str(error))])
    except BaseException as error:
        return Verdict(problems=[Problem("error", repr(error))])


if __name__ == "__main__":
    sys.exit(main())
