"""Predicted against measured: one model through three policies, on this machine and on the virtual clock.

    python benchmarks/prediction.py [MODEL_DIR] [--machine FILE]

Without MODEL_DIR a random mixtral-0.8b is written to the cache folder once. Without --machine the machine is calibrated
first; the calibration sees neither the model nor the policies nor the budget. Each policy runs once without being
counted, since the first product of every size is prepared then, and REPEATS times for the medians that are compared.
Runs during which other processes took more than a tenth of a core are done again, up to MOST_RUNS in all; what they
took is in the result. Loading is left out. The result goes to benchmarks/results/prediction-<machine>.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from _results import named_for_machine, write_result

from moesched import plugins
from moesched.calibrate import calibrate
from moesched.machines import Machine, parse_machine
from moesched.machines.local import cache_folder, calibrated_file
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.plan import Batch, Plan, split_batch
from moesched.runs import plan_run, run, simulate
from moesched.tasks import Task

MODEL = "mixtral-0.8b"
BUDGET_SHARE = 0.4
BATCH = 16
STEPS = 8
REPEATS = 5
MOST_RUNS = 12
MOST_OTHER_CORES = 0.1


class Case(msgspec.Struct, frozen=True):
    """One run: the budget is a share of the weights."""

    policy: str
    micro_batch_size: int
    budget_share: float | None = None


CASES = (
    Case("resident", 16),
    Case("layer_streaming", 16, BUDGET_SHARE),
    Case("cgopipe", 16, BUDGET_SHARE),
    Case("cgopipe", 8, BUDGET_SHARE),
)


class Times:
    """How long tasks took, by phase and verb, and when the first one started."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.first = float("inf")

    def ended(self, task: Task) -> None:
        """Note a task, unless it loads what stays."""
        if task.step >= 0:
            self.first = min(self.first, task.start / 1e9)
            phase = "decode" if task.step else "prefill"
            self.seconds.setdefault(f"{phase} {task.verb}", []).append((task.end - task.start) / 1e9)


class OtherLoad:
    """Cores that other processes, and the machine's host, kept busy since it was made."""

    def __init__(self) -> None:
        self._since = time.perf_counter(), self._busy_seconds()

    def cores(self) -> float:
        """0 where the system does not tell."""
        start, busy = self._since
        return max(0.0, self._busy_seconds() - busy) / (time.perf_counter() - start)

    @staticmethod
    def _busy_seconds() -> float:
        try:
            numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return 0.0
        user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, numbers)
        everybody = (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return everybody - own.user - own.system


def batch_of(vocabulary: int, micro_batch_size: int) -> tuple[Batch, list[list[int]]]:
    """Prompts of 4 to 12 random tokens."""
    chance = random.Random(1)
    prompts = [[chance.randrange(vocabulary) for _ in range(chance.randint(4, 12))] for _ in range(BATCH)]
    return split_batch([len(prompt) for prompt in prompts], STEPS, micro_batch_size), prompts


def plan_case(
    case: Case, machine: Machine, layout: WeightLayout, batch: Batch, slot_bytes: Any
) -> tuple[Plan, Any]:
    """A fresh policy and its plan."""
    budgets = {}
    if case.budget_share is not None:
        weights = layout.globals_bytes + sum(page.nbytes for page in layout.pages)
        budgets["host"] = int(case.budget_share * weights)
    policy = plugins.make_policy(case.policy)
    return plan_run(machine, layout, batch, policy, budgets, slot_bytes), policy


def figures(report: Any, times: Times) -> dict[str, float]:
    """What is compared, in seconds: the whole, the lanes, and the mean task of each kind."""
    prefill, *decode = report.step_seconds
    prefill += report.load_seconds - times.first  # starting the driver is nobody's work
    return {
        "total": prefill + sum(decode),
        "prefill": prefill,
        "decode step": mean(decode),
        **{f"lane {name}": use.busy_seconds for name, use in report.lanes.items()},
        **{name: mean(seconds) for name, seconds in sorted(times.seconds.items())},
    }


def measure_once(case: Case, machine: Machine, directory: Path) -> dict[str, float]:
    """One run on the device."""
    gc.collect()  # what the run before left, weights and all, in cycles
    checkpoint = open_checkpoint(directory)
    layout = weight_layout(checkpoint.config)
    device = plugins.find("devices", "torch")(checkpoint, layout)
    batch, prompts = batch_of(checkpoint.config.vocabulary, case.micro_batch_size)
    plan, policy = plan_case(case, machine, layout, batch, device.slot_bytes)
    times = Times()
    return figures(run(plan, policy, device, prompts, observers=[times]), times)


def predict(case: Case, machine: Machine, directory: Path) -> dict[str, float]:
    """The same run on the virtual clock."""
    config = open_checkpoint(directory).config
    layout = weight_layout(config)
    batch, _ = batch_of(config.vocabulary, case.micro_batch_size)
    plan, policy = plan_case(case, machine, layout, batch, None)
    times = Times()
    return figures(simulate(plan, policy, observers=[times]), times)


def compare(case: Case, machine: Machine, directory: Path) -> dict[str, Any]:
    """One case, measured and predicted."""
    measure_once(case, machine, directory)
    runs: list[tuple[float, dict[str, float]]] = []
    quiet = 0
    while quiet < REPEATS and len(runs) < MOST_RUNS:
        load = OtherLoad()
        result = measure_once(case, machine, directory)
        runs.append((load.cores(), result))
        quiet += runs[-1][0] <= MOST_OTHER_CORES
    runs.sort(key=lambda each: each[0])
    counted = runs[:REPEATS]
    predicted = predict(case, machine, directory)
    measured = {name: median(result[name] for _, result in counted) for name in counted[0][1]}
    return {
        **msgspec.to_builtins(case),
        "other_cores": [round(cores, 2) for cores, _ in counted],
        "measured_totals": [result["total"] for _, result in counted],
        "measured": measured,
        "predicted": predicted,
        "error_percent": {
            name: round(100 * (predicted[name] / seconds - 1), 1)
            for name, seconds in measured.items()
            if seconds and name in predicted
        },
    }


def table(result: dict[str, Any]) -> str:
    """The figures of a case side by side."""
    title = f"{result['policy']}, micro-batches of {result['micro_batch_size']}"
    lines = [f"{title}, others on {max(result['other_cores']):.2f} cores"]
    for name, error in result["error_percent"].items():
        measured, predicted = result["measured"][name], result["predicted"][name]
        lines.append(f"  {name:<24} {measured * 1e3:10.3f} ms {predicted * 1e3:10.3f} ms {error:+7.1f} %")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Compare all cases, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=cache_folder() / MODEL)
    parser.add_argument("--machine", type=Path, help="a calibrated machine file; by default one is made")
    options = parser.parse_args(arguments)
    if not options.model.exists():
        print(f"writing {MODEL} to {options.model}")
        write_random_model(MODEL, options.model)
    if options.machine is None:
        print("calibrating")
        calibrate()
    file = options.machine or calibrated_file()
    machine = parse_machine(file.read_bytes(), str(file))
    results = []
    print(f"{'':<26} {'measured':>13} {'predicted':>13} {'error':>9}")
    for case in CASES:
        results.append(compare(case, machine, options.model))
        print(table(results[-1]), flush=True)
    worst = max(abs(result["error_percent"]["total"]) for result in results)
    print(f"largest error of a total: {worst:.1f} %")
    report = {
        "command": "python benchmarks/prediction.py",
        "calibration": {"name": machine.name, "description": machine.description},
        "model": MODEL,
        "batch_size": BATCH,
        "new_tokens": STEPS,
        "largest_total_error_percent": worst,
        "runs": results,
    }
    print(write_result(named_for_machine("prediction"), report, "torch"))


if __name__ == "__main__":
    main(sys.argv[1:])
