"""The host's own time in decode steps of few requests: all that passes between native calls.

`mixtral-0.8b` under the policy `resident`, all weights in memory. A shim in C (`_native_calls.c`) stands between Python
and the kernels, and notes when each call begins and ends. A step lasts from the end of its predecessor's last call to
the end of its own last one. What is outside of native calls is the host's own time: Python, the engine, ctypes, and
waits for the interpreter while the policy submits. Medians of the steps count, in the rounds with the least other load.

A layer's weights push Python's own code and data out of the caches. So one row is of a model of the same layers that
is small enough to leave them there. Another part issues the tasks of that model to the streams of a GPU that does
nothing (`_idle_gpu.py`): its steps are all host's time.
"""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most
from benchmarks.record.tables import table_of
from benchmarks.shared.compiled import compiled
from benchmarks.shared.kept_models import kept_model
from benchmarks.shared.small_shape import small_shape
from benchmarks.speed import _idle_gpu
from moesched.calibration.timing import OtherLoad
from moesched.devices.native.compiled import library
from moesched.jobs.session import run_model
from moesched.models.random_model import write_random_model

T = TypeVar("T")

MODEL = "mixtral-0.8b"
SMALL = "small model, batch 1"
BATCHES = {"batch 1": 1, "batch 4": 4, "batch 16": 16, SMALL: 1}
PROMPT, NEW_TOKENS = 128, 40
SKIPPED = 3
"""Steps at the start, which prepare the calls of later ones."""
FUNCTIONS = ("embed", "attention_inputs", "attend", "moe_layer", "logits")
"""The kernels of a step; the last one ends it."""
SOURCE = Path(__file__).with_name("_native_calls.c")
MOST_CALLS = 1 << 18
PYTHON_API = 4
"""The flag of functions that ctypes calls without letting other Python threads run."""
TOLERATED_CORES = 0.1
"""Cores that others may keep busy in a round beyond those in the quietest one."""
BAR_MICROSECONDS, BAR_SHARE = 15.0, 0.1
"""Of the host's time for a task, and of its share of a step, at batch 1."""
ISSUING = "issuing to a GPU that does nothing"
ISSUED_TOKENS, STEPS_OF_A_RUN = 200, 10
BAR_ISSUING = 25.0
"""Microseconds for a task."""


class Call(NamedTuple):
    """A native call: the number of its function, and its times in nanoseconds."""

    function: int
    begin: int
    end: int


class Step(NamedTuple):
    """The calls of a decode step, and the end of the step before."""

    since: int
    calls: list[Call]

    @property
    def whole(self) -> int:
        """Nanoseconds of the step."""
        return self.calls[-1].end - self.since

    @property
    def host(self) -> int:
        """Nanoseconds outside of native calls."""
        return self.whole - sum(call.end - call.begin for call in self.calls)


def claims(result: Result) -> Iterator[Claim]:
    """The host's own time between native calls."""
    row = result["rows"]["batch 1"]
    words = "a decode step of `mixtral-0.8b`, batch 1, resident: the host's own time"
    yield at_most(f"{words} for each task", row["microseconds_per_task"], BAR_MICROSECONDS, "{:.1f} µs")
    yield at_most(f"{words}, share", 100 * row["share"], 100 * BAR_SHARE, "{:.1f} %")
    words = "a decode step on a GPU that does nothing, batch 1, resident: the host's time for each task"
    yield at_most(words, result["issuing"]["microseconds_per_task"], BAR_ISSUING, "{:.1f} µs")


HOST_TIME = {
    "step": "{name}",
    "ms": "{step_ms:.2f}",
    "host's time for each task, µs": "{microseconds_per_task:.1f}",
    "its share": "{share:.1%}",
    "from attention to experts, µs": "{microseconds_between[attend to moe_layer]:.1f}",
    "from experts to the next layer, µs": "{microseconds_between[moe_layer to attention_inputs]:.1f}",
}


def tables(result: Result) -> dict[str, str]:
    """The time between native calls, by the size of the batch."""
    return {"host-time": table_of(({"name": name, **row} for name, row in result["rows"].items()), HOST_TIME)}


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=[*BATCHES, ISSUING],
    rounds=5,
    rounds_help="runs of each batch",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    whole = kept_model(MODEL)
    found = {}
    with TemporaryDirectory() as folder:
        small = write_random_model(small_shape(MODEL), Path(folder) / "model")
        for name in [each for each in options.only if each in BATCHES]:
            model = small if name == SMALL else whole
            found[name] = measured(model, BATCHES[name], options.rounds)
        issuing = issued(small, options.rounds) if ISSUING in options.only else {}
    return BENCHMARK.write({"model": MODEL, "policy": "resident", "rows": found, "issuing": issuing})


def measured(model: Path, batch: int, rounds: int) -> dict[str, Any]:
    """One batch: medians over all steps of the quietest rounds."""
    cores, steps = quietest(f"batch {batch}", rounds, lambda: steps_of(decode(model, batch))[SKIPPED:])
    tasks = len(steps[0].calls)
    return {
        "other_cores": cores,
        "steps": len(steps),
        "tasks_per_step": tasks,
        "step_ms": round(median(step.whole for step in steps) / 1e6, 3),
        "microseconds_per_task": round(median(step.host for step in steps) / tasks / 1e3, 2),
        "share": round(median(step.host / step.whole for step in steps), 4),
        "microseconds_between": between(steps),
    }


def issued(model: Path, rounds: int) -> dict[str, Any]:
    """A sequence on a GPU that does nothing: the median over runs of ten steps in the quietest rounds.

    Ends of tasks are reported together, so that the steps of a run take turns at being short and long.
    """
    _idle_gpu.install()
    cores, runs = quietest(ISSUING, rounds, lambda: _runs_of_steps(model))
    return {
        "other_cores": cores,
        "steps": STEPS_OF_A_RUN * len(runs),
        "microseconds_per_task": round(median(runs) * 1e6, 2),
    }


def _runs_of_steps(model: Path) -> list[float]:
    """Seconds for each task, in runs of steps."""
    steps = _idle_gpu.decode(model, ISSUED_TOKENS)[ISSUED_TOKENS // 10 :]
    return [fmean(steps[first : first + STEPS_OF_A_RUN]) for first in range(0, len(steps), STEPS_OF_A_RUN)]


def quietest(name: str, rounds: int, run: Callable[[], list[T]]) -> tuple[list[float], list[T]]:
    """The cores that other processes kept busy in each round, and all steps of the rounds with the fewest."""
    found: list[tuple[float, list[T]]] = []
    for _ in track(range(rounds), name, still=True):
        load = OtherLoad()
        steps = run()
        found.append((load.cores(), steps))
    quiet = min(cores for cores, _ in found) + TOLERATED_CORES
    steps = [step for cores, of_round in found if cores <= quiet for step in of_round]
    return [round(cores, 2) for cores, _ in found], steps


def between(steps: Sequence[Step]) -> dict[str, float]:
    """The time from a call's end to the next one's begin, by their functions."""
    gaps = defaultdict(list)
    for step in steps:
        gaps[f"{FUNCTIONS[-1]} to {FUNCTIONS[0]}"].append(step.calls[0].begin - step.since)
        for one, other in pairwise(step.calls):
            gaps[f"{FUNCTIONS[one.function]} to {FUNCTIONS[other.function]}"].append(other.begin - one.end)
    return {name: round(median(each) / 1e3, 2) for name, each in gaps.items()}


def steps_of(calls: Sequence[Call]) -> list[Step]:
    """The decode steps of a run; what precedes the first token is none."""
    ends = [number for number, call in enumerate(calls) if call.function == len(FUNCTIONS) - 1]
    return [Step(calls[before].end, list(calls[before + 1 : end + 1])) for before, end in pairwise(ends)]


def decode(model: Path, batch: int) -> list[Call]:
    """The native calls of one run."""
    prompts = [[(31 * request + 17 * n) % 1000 for n in range(PROMPT)] for request in range(batch)]
    with noting() as shim:
        run_model(
            model,
            prompts,
            policy="resident",
            max_new_tokens=NEW_TOKENS,
            batch_size=batch,
            micro_batch_size=batch,
        )
        numbers = (ctypes.c_int64 * (len(Call._fields) * MOST_CALLS))()
        count = shim.take_calls(numbers, ctypes.c_int64(MOST_CALLS))
        return [Call(*numbers[3 * number : 3 * number + 3]) for number in range(count)]


@contextmanager
def noting() -> Iterator[ctypes.CDLL]:
    """Have the shim between Python and the kernels."""
    shim, kernels = compiled(SOURCE), library()
    shim.take_calls.restype = ctypes.c_int64
    before = {name: getattr(kernels, f"moesched_{name}") for name in FUNCTIONS}
    for number, (name, function) in enumerate(before.items()):
        shim.pass_on(ctypes.c_int64(number), function)
        # As before, without other Python threads where the call itself is one without.
        holds = function._flags_ & PYTHON_API
        noted = getattr(ctypes.PyDLL(shim._name) if holds else shim, f"noted_{number}")
        noted.argtypes = function.argtypes
        setattr(kernels, f"moesched_{name}", noted)
    try:
        yield shim
    finally:
        for name, function in before.items():
            setattr(kernels, f"moesched_{name}", function)


if __name__ == "__main__":
    sys.exit(main())
