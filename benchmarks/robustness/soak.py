"""A million tasks in real time: is memory flat, and are the last tasks as fast as the first?

A small model generates batch after batch in one process, under a policy that streams weights. Seconds and memory of
windows of tasks are written; the first windows warm up and are not compared.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result
from benchmarks.shared.small_runs import ONE_MEMORY, fast_memory
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.tasks import Task

PROMPTS = [[1, 2, 3], [4, 5]]
NEW_TOKENS = 200
WINDOWS = 20
WARM_UP = 4
"""Windows before the first that is compared: allocators and caches have their size then."""
COMPARED = 4
"""Windows at either end whose medians are compared."""
GROWTH, SLOWDOWN = 0.01, 0.05

MODEL = SHAPES["mixtral-0.8b"].varied(
    name="mixtral", layers=4, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16,
    experts=4, vocabulary=256, stop_tokens=(),
)  # fmt: skip


def claims(result: Result) -> Iterator[Claim]:
    """A million tasks in one process."""
    words = f"{result['tasks']:,} tasks in real time: growth of memory, and of the time of a task"
    figures = f"{100 * result['grown']:.1f} %, {100 * result['slower']:.1f} %"
    yield Claim(words, figures, "≤ 1.0 %, ≤ 5.0 %", result["holds"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    packages=("torch",),
    claims=claims,
    parts=["tasks"],
    rounds=1_000_000,
    rounds_help="tasks",
)


class Counter:
    """Counts the tasks that ran."""

    def __init__(self) -> None:
        self.tasks = 0

    def ended(self, task: Task) -> None:
        """Count a task."""
        self.tasks += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tasks, print what changed, write the result; 1 if memory grew or tasks became slower."""
    options = BENCHMARK.parse(arguments)
    with TemporaryDirectory() as folder:
        model = write_random_model(MODEL, Path(folder) / "model", dtype="bfloat16")
        windows = run_windows(model, max(1, options.rounds // WINDOWS))
    result = {"tasks": sum(each["tasks"] for each in windows), **changes(windows), "windows": windows}
    return BENCHMARK.write(result)


def run_windows(model: Path, tasks: int) -> list[dict[str, Any]]:
    """Batches in one device, as many as it takes for the tasks of each window."""
    counter = Counter()
    checkpoint = open_checkpoint(model)
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config, dtype="bfloat16"))
    windows = []
    for _ in track(range(WINDOWS), "windows", still=True):
        start, before = perf_counter(), counter.tasks
        while counter.tasks < before + tasks:
            run_batch(device, counter)
        seconds, ran = perf_counter() - start, counter.tasks - before
        gc.collect()
        windows.append(
            {
                "tasks": ran,
                "us_per_task": seconds / ran * 1e6,
                "resident_bytes": psutil.Process().memory_info().rss,
            }
        )
    device.close()
    return windows


def run_batch(device: TorchDevice, counter: Counter) -> None:
    """Generate from the prompts, with room for half of the weights."""
    policy, batch = (
        make_policy("lru_offload"),
        split_batch([len(prompt) for prompt in PROMPTS], NEW_TOKENS, 1),
    )
    budgets = fast_memory(device, ONE_MEMORY, batch, 0.5)
    plan = plan_run(ONE_MEMORY, device.layout, batch, policy, budgets, device.slot_bytes)
    run(plan, policy, device, PROMPTS, observers=[counter], keep_open=True)


def changes(windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Growth of memory and of the time of a task, from the first windows to the last."""
    first, last = windows[WARM_UP : WARM_UP + COMPARED], windows[-COMPARED:]
    grown, slower = (
        median(each[name] for each in last) / median(each[name] for each in first) - 1
        for name in ("resident_bytes", "us_per_task")
    )
    return {"grown": grown, "slower": slower, "holds": grown <= GROWTH and slower <= SLOWDOWN}


if __name__ == "__main__":
    raise SystemExit(main())
