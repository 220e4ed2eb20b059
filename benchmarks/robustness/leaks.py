"""Good and failing runs, many in one process: do memory, devices, threads and open files stay as they are?

The failing runs take turns: a policy that breaks the rules, one that raises an error of its own, weights that become
unreadable, logits that are not finite, a listener that raises, a batch that does not fit, and an interrupt.
Then a million tasks of one device, batch after batch under a policy that streams weights: are the last ones as fast as
the first?
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import psutil

import moesched
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of
from benchmarks.shared.small_runs import ONE_MEMORY, fast_memory
from moesched.devices.torch.device import TorchDevice
from moesched.errors import MoeschedError
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.plugins import find, make_policy
from moesched.policies.cgopipe import CGOPipe
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.listeners import Listener
from moesched.runs.planning import plan_run
from moesched.steps.step import Step
from moesched.tasks import Task

PROMPTS = [[1, 2, 3], [4]]
NEW_TOKENS = 4
WARM_UP = 0.4
"""Share of the runs before the first reading: allocators and caches have their size then."""
GROWTH = 0.02
SOAK = "tasks of one device"
TASKS_A_ROUND, WINDOWS = 1000, 20
"""Tasks for each of `--rounds`, and the windows in which they are timed; the first four warm up."""
GROWN, SLOWER = 0.01, 0.05
"""Bars of the growth of memory, and of the time of a task."""
FEWER = {"torch": 1, "mlx": 10, "emulated": 10, "run_local": 10}
"""Divisors of `--rounds` for what takes longer."""

MODEL = SHAPES["mixtral-0.8b"].varied(
    name="mixtral", layers=3, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16,
    experts=4, vocabulary=256, stop_tokens=(),
)  # fmt: skip


def claims(result: Result) -> Iterator[Claim]:
    """Many runs in one process."""
    runs = [case for case in result["cases"] if case["part"] != SOAK]
    words = "many good and failing runs in one process: memory, devices, threads and files flat, by device"
    yield all_of(words, sum(case["flat"] for case in runs), len(runs))
    for case in result["cases"]:
        if case["part"] == SOAK:
            words = f"{case['tasks']:,} tasks in real time: growth of memory, and of the time of a task"
            figures = f"{100 * case['grown']:.1f} %, {100 * case['slower']:.1f} %"
            yield Claim(words, figures, "≤ 1.0 %, ≤ 5.0 %", case["flat"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=[*(f"{device}, {kind}" for device in FEWER for kind in ("good", "failing")), SOAK],
    rounds=1000,
    rounds_help="good runs, and failing ones, on torch; a tenth of it elsewhere; thousands of tasks",
    by_machine=False,
    keeps_parts=True,
    replaces=("soak",),
)


class Illegal(CGOPipe):
    """Breaks the rules in its second step."""

    async def decode(self, step: Step) -> None:
        step.sample(step.micro_batches[0])


class Stumbles(CGOPipe):
    """Raises an error of its own in its second step."""

    async def decode(self, step: Step) -> None:
        raise KeyError("of the policy")


class Breaks(Listener):
    """Does something at the first token."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def generated(self, request: int, token: int, text: str) -> None:
        self._act()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print what grew, write the result; 1 where something did."""
    options = BENCHMARK.parse(arguments)
    with TemporaryDirectory() as folder:
        model = write_random_model(MODEL, Path(folder) / "model", dtype="float32")
        for part in options.only:
            found = soaked(model, options.rounds) if part == SOAK else many_runs(part, model, options.rounds)
            code = BENCHMARK.write({"cases": BENCHMARK.joined("cases", part, found)})
    return code


def many_runs(part: str, model: Path, rounds: int) -> dict[str, Any]:
    """Good or failing runs on a device."""
    device, kind = part.split(", ")
    runs = max(10, rounds // FEWER[device])
    return {"runs": runs, **growth(device, kind, model, runs)}


def growth(device: str, kind: str, model: Path, runs: int) -> dict[str, Any]:
    """Resources before and after some runs."""
    every = good(device) if kind == "good" else failing(device)
    warm_up = int(WARM_UP * runs)
    before: dict[str, float] = {}
    turns = list(islice(cycle(every), warm_up + runs))
    for number, each in enumerate(track(turns, f"{device}, {kind}", still=True)):
        if number == warm_up:
            before = resources(device)
        each(model)
    after = resources(device)
    grown = {name: after[name] - before[name] for name in before}
    flat = grown["resident_bytes"] <= GROWTH * before["resident_bytes"]
    flat = flat and not any(grown[name] > 0 for name in grown if name != "resident_bytes")
    return {"before": before, "after": after, "flat": flat}


def resources(device: str) -> dict[str, float]:
    """This process's memory, live devices, threads and descriptors."""
    gc.collect()
    process = psutil.Process()
    kinds = tuple(
        find("devices", name) for name in ("torch", "emulated", *(["mlx"] if device == "mlx" else []))
    )
    return {
        "resident_bytes": process.memory_info().rss,
        "devices": sum(isinstance(each, kinds) for each in gc.get_objects()),
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "children": len(process.children()),
    }


class Counter:
    """Counts the tasks that ran."""

    tasks = 0

    def ended(self, task: Task) -> None:
        """Count a task."""
        self.tasks += 1


def soaked(model: Path, rounds: int) -> dict[str, Any]:
    """Memory and the time of a task, in windows of batches on one device with room for half of the weights."""
    counter, checkpoint = Counter(), open_checkpoint(model)
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config))
    batch = split_batch([len(prompt) for prompt in PROMPTS], 200, 1)
    budgets = fast_memory(device, ONE_MEMORY, batch, 0.5)
    windows = []
    for _ in track(range(WINDOWS), SOAK, still=True):
        start, before = perf_counter(), counter.tasks
        while counter.tasks < before + rounds * TASKS_A_ROUND // WINDOWS:
            policy = make_policy("lru_offload")
            plan = plan_run(ONE_MEMORY, device.layout, batch, policy, budgets, device.slot_bytes)
            run(plan, policy, device, PROMPTS, observers=[counter], keep_open=True)
        seconds = perf_counter() - start
        windows.append((1e6 * seconds / (counter.tasks - before), resources("torch")["resident_bytes"]))
    device.close()
    (slower, grown) = (
        median(last) / median(first) - 1
        for first, last in zip(zip(*windows[4:8], strict=True), zip(*windows[-4:], strict=True), strict=True)
    )
    flat = grown <= GROWN and slower <= SLOWER
    return {"tasks": counter.tasks, "grown": grown, "slower": slower, "flat": flat, "windows": windows}


Run = Callable[[Path], None]


def good(device: str) -> list[Run]:
    """Runs that end well."""
    if device == "run_local":
        return [lambda model: tokens_of(moesched.run_local(model, PROMPTS, nodes=2, **NODES))]
    return [lambda model: tokens_of(generate(model, device))]


NODES: dict[str, Any] = {"policy": "ep_naive", "max_new_tokens": NEW_TOKENS}


def generate(model: Path, device: str, **more: Any) -> Any:
    options: dict[str, Any] = {"policy": "cgopipe", "max_new_tokens": NEW_TOKENS, "device": device} | more
    if device == "emulated":
        options |= {"machine": "t4", "device_settings": {"dilation": 2.0}}
    return moesched.run_model(model, PROMPTS, **options)


def tokens_of(report: Any) -> None:
    assert report.failure is None
    assert all(len(tokens) == NEW_TOKENS for tokens in report.tokens), report


def failing(device: str) -> list[Run]:
    """Runs that fail in every way."""
    if device == "run_local":
        return [
            lambda model: fails(
                moesched.run_local,
                model,
                nodes=2,
                **NODES | {"policy": "benchmarks.robustness.leaks:Illegal"},
            ),
            lambda model: fails(moesched.run_local, model, nodes=2, listener=Breaks(interrupt), **NODES),
        ]
    return [
        lambda model: fails(generate, model, device=device, policy="benchmarks.robustness.leaks:Illegal"),
        lambda model: fails(generate, model, device=device, policy="benchmarks.robustness.leaks:Stumbles"),
        lambda model: fails(generate, model, device=device, listener=Breaks(stumble)),
        lambda model: fails(generate, model, device=device, listener=Breaks(interrupt)),
        lambda model: fails(generate, model, device=device, budgets={"host": 1000}),
        lambda model: unreadable(model, device),
        lambda model: not_finite(model, device),
    ]


def fails(run: Callable[..., Any], model: Path, *prompts: Any, **options: Any) -> None:
    """A run that raises, or whose report tells of a failure or an interrupt."""
    if run is not generate:
        prompts = (PROMPTS,)
    with suppress(MoeschedError, KeyError, KeyboardInterrupt):
        report = run(model, *prompts, **options)
        assert report.failure is not None or report.interrupted, report


def stumble() -> None:
    raise KeyError("of the listener")


def interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def copied(model: Path) -> Iterator[Path]:
    with TemporaryDirectory(dir=model.parent) as folder:
        yield Path(shutil.copytree(model, Path(folder) / "copy"))


def unreadable(model: Path, device: str) -> None:
    """A run whose weights are cut off at its first token."""
    with copied(model) as damaged:
        shard = next(damaged.glob("*.safetensors"))
        cut = Breaks(lambda: os.truncate(shard, 1000))
        fails(generate, damaged, device=device, policy="layer_streaming", listener=cut, **SMALL)


SMALL: dict[str, Any] = {"max_new_tokens": 50, "budgets": {"host": 900_000}}


def not_finite(model: Path, device: str) -> None:
    """A run on weights with infinite numbers."""
    with copied(model) as damaged:
        stored = open_checkpoint(damaged).tensors["final_norm"]
        with stored.file.open("r+b") as file:
            file.seek(stored.offset)
            file.write(np.full(MODEL.hidden, np.inf, np.float32).tobytes())
        fails(generate, damaged, device=device)


if __name__ == "__main__":
    sys.exit(main())
