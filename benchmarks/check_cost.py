"""Cost of the checks around a policy, as a share of a decode step of one request.

Calls times cost per call: each verb compares the thread that calls it with the policy's, each await ends the policy's
turn and begins another, and each batch looks at the weights' files twice. Calls are counted in runs on this machine,
whose median decode step the share is of. Costs are medians of tight loops, without those of an empty loop.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import get_ident
from time import perf_counter
from typing import Any

from _counted import POLICIES, awaits
from _options import EXECUTION, Benchmark, track

import moesched
from moesched.models.checkpoint import open_checkpoint
from moesched.models.random_model import write_random_model
from moesched.runs.listeners import Listener
from moesched.steps.turn import Turn
from moesched.tasks import Task

BAR = 0.005
NEW_TOKENS = 24
LOOPS = 100_000
MODEL = "mixtral-0.8b"

BENCHMARK = Benchmark(
    __doc__, "check_cost", measures=EXECUTION, packages=("torch",), parts=POLICIES, rounds=5
)


class Verbs(Listener):
    """Counts the verbs of each step."""

    def __init__(self) -> None:
        self.by_step: Counter[int] = Counter()

    def ended(self, task: Task) -> None:
        self.by_step[task.step] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the shares, write the result; 1 where one is above the bar."""
    options = BENCHMARK.parse(arguments)
    with TemporaryDirectory() as folder:
        model = write_random_model(MODEL, Path(folder) / "model")
        checkpoint = open_checkpoint(model)
        costs = {
            "verb_seconds": seconds_per_call(lambda turn: turn.thread != get_ident()),
            "await_seconds": seconds_per_call(wait_once),
            "files_seconds": seconds_per_call(lambda turn: checkpoint.require_unchanged(), loops=1000),
        }
        cases = {name: case(model, name, costs, options.rounds) for name in track(options.only, "running")}
    worst = max(each["share"] for each in cases.values())
    print(f"at most {100 * worst:.3f} % of a decode step")
    BENCHMARK.write({"bar": BAR, "largest_share": worst, "costs": costs, "policies": cases})
    return int(worst > BAR)


def wait_once(turn: Turn) -> None:
    """End a policy's turn, and begin another."""
    turn.pause()
    turn.begin()


def seconds_per_call(check: Callable[[Turn], object], loops: int = LOOPS) -> float:
    """The median time of a check, beyond that of a function that does nothing."""
    turn = Turn("decode step 1")

    def timed(call: Callable[[Turn], object]) -> float:
        start = perf_counter()
        for _ in repeat(None, loops):
            call(turn)
        return (perf_counter() - start) / loops

    return max(0.0, median(timed(check) - timed(lambda turn: None) for _ in range(7)))


def case(model: Path, name: str, costs: dict[str, float], rounds: int) -> dict[str, Any]:
    """Calls in a decode step of one request, and the share that their checks take of it."""
    steps: list[float] = []
    for _ in range(rounds):
        awaits.clear()
        verbs = Verbs()
        report = moesched.run_model(
            model, [[1, 2, 3, 4]], policy=f"_counted:{name}", max_new_tokens=NEW_TOKENS, listener=verbs
        )
        steps += report.step_seconds[1:]
    calls = max(verbs.by_step[index] for index in range(1, NEW_TOKENS))
    waited = max(awaits[index] for index in range(1, NEW_TOKENS))
    seconds = median(steps)
    per_step = calls * costs["verb_seconds"] + waited * costs["await_seconds"]
    per_step += 2 * costs["files_seconds"] / NEW_TOKENS
    return {"verbs": calls, "awaits": waited, "step_seconds": seconds, "share": per_step / seconds}


if __name__ == "__main__":
    sys.exit(main())
