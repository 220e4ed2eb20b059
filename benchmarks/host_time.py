"""The host's own time in decode steps of few requests: all that passes between native calls.

`mixtral-0.8b` under the policy `resident`, all weights in memory. A shim in C (`_native_calls.c`) stands between Python
and the kernels, and notes when each call begins and ends. A step lasts from the end of its predecessor's last call to
that of its own; what is not within a native call is the host's own time: Python, the engine, the foreign function
interface, and waits for the interpreter. Medians of the steps count.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _compiled import compiled
from _options import EXECUTION, Benchmark, track

from moesched.devices.native.compiled import library
from moesched.jobs.run_model import run_model
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.system.cache import cache_folder

MODEL = "mixtral-0.8b"
BATCHES = {"batch 1": 1, "batch 4": 4, "batch 16": 16}
PROMPT, NEW_TOKENS = 128, 40
SKIPPED = 3
"""Steps at the start, which prepare the calls of later ones."""
FUNCTIONS = ("embed", "attention_inputs", "attend", "moe_layer", "logits")
"""The kernels of a step; the last one ends it."""
SOURCE = Path(__file__).with_name("_native_calls.c")
MOST_CALLS = 1 << 18
PYTHON_API = 4
"""The flag of functions that ctypes calls without letting other Python threads run."""
BAR_MICROSECONDS, BAR_SHARE = 15.0, 0.1
"""Of the host's time for a task, and of its share of a step, at batch 1."""

Calls = np.ndarray[Any, np.dtype[np.int64]]
"""One row for each call: its function, and when it began and ended."""

BENCHMARK = Benchmark(
    __doc__,
    "host_time",
    measures=("benchmarks/_native_calls.c", *EXECUTION),
    packages=("torch",),
    parts=BATCHES,
    rounds=3,
    rounds_help="runs of each batch; all their steps count",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print what came out, write the result."""
    BENCHMARK.parser.add_argument("--model", type=Path, default=cache_folder() / MODEL, metavar="FOLDER")
    options = BENCHMARK.parse(arguments)
    if not (options.model / "config.json").exists():
        write_random_model(SHAPES[MODEL], options.model)
    found = {name: measured(options.model, BATCHES[name], options.rounds) for name in options.only}
    for name, row in found.items():
        print(f"{name}: {row}", flush=True)
    bars = {"microseconds_per_task": BAR_MICROSECONDS, "share": BAR_SHARE}
    BENCHMARK.write({"model": MODEL, "policy": "resident", "bars": bars, "rows": found})


def measured(model: Path, batch: int, rounds: int) -> dict[str, Any]:
    """One batch: medians over all steps."""
    steps: list[Calls] = []
    for _ in track(range(rounds), f"batch {batch}", still=True):
        steps += steps_of(decode(model, batch))[SKIPPED:]
    tasks = len(steps[0]) - 1
    whole = [step[-1, 2] - step[0, 2] for step in steps]
    native = [np.sum(step[1:, 2] - step[1:, 1]) for step in steps]
    host = [span - inside for span, inside in zip(whole, native, strict=True)]
    return {
        "steps": len(steps),
        "tasks_per_step": tasks,
        "step_ms": round(median(whole) / 1e6, 3),
        "native_ms": round(median(native) / 1e6, 3),
        "microseconds_per_task": round(median(host) / tasks / 1e3, 2),
        "share": round(median(own / span for own, span in zip(host, whole, strict=True)), 4),
        "microseconds_between": between(steps),
    }


def between(steps: Sequence[Calls]) -> dict[str, float]:
    """The time from a call's end to the next one's begin, by their functions."""
    gaps = defaultdict(list)
    for step in steps:
        for (one, _, end), (other, begin, _) in pairwise(step.tolist()):
            gaps[f"{FUNCTIONS[one]} to {FUNCTIONS[other]}"].append(begin - end)
    return {name: round(median(each) / 1e3, 2) for name, each in gaps.items()}


def steps_of(calls: Calls) -> list[Calls]:
    """The calls of each decode step, and before them the last one of the step before."""
    ends = np.flatnonzero(calls[:, 0] == len(FUNCTIONS) - 1)
    return [calls[last : end + 1] for last, end in pairwise(ends)]


def decode(model: Path, batch: int) -> Calls:
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
        calls = np.zeros((MOST_CALLS, 3), np.int64)
        return calls[: shim.take_calls(ctypes.c_void_p(calls.ctypes.data), MOST_CALLS)]


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
    main()
