"""How good the planner's choice is: against the best of a grid of sizes, each looked at on the virtual clock.

    python benchmarks/plan_search.py

For Mixtral 8x7B on several machines, padded and not, the planner searches and picks. Then every shipped policy that it
chooses from is looked at with every size of micro-batches and every number of them on a grid as wide as memory allows.
Regret is how much more the best of the grid reaches than the planner's choice. The time of the whole command
`moesched plan` is measured too. Writes results/plan_search-<machine>.json.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

from _results import named_for_machine, write_result
from rich.progress import track

from moesched.cost import cost_model
from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner import POLICIES, plan_best
from moesched.planner.traits import Setting
from moesched.plugins import find
from moesched.preview import preview
from moesched.workloads import load_workload

CASES = [
    ("t4", 128, False),
    ("t4", 128, True),
    ("l4", 64, True),
    ("a100-80g", 32, False),
]
"""Machine, tokens to generate, whether prompts are padded to the longest."""
MICRO_BATCHES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
MOST_REQUESTS = 4096
REPEATS = 3
COMMAND = [
    "plan",
    "--model",
    "mixtral-8x7b",
    "--machine",
    "t4",
    "--workload",
    "mtbench",
    "--gen",
    "128",
    "--json",
]


def main() -> None:
    """Search, try the grid, and write both."""
    cases = [case(*each) for each in track(CASES, description="planning and trying")]
    commands = [command_seconds() for _ in range(REPEATS)]
    result = {
        "model": "mixtral-8x7b",
        "workload": "mtbench",
        "cases": cases,
        "worst_regret": max(each["regret"] for each in cases),
        "search_seconds": median(each["search_seconds"] for each in cases),
        "command_seconds": median(commands),
    }
    print(write_result(named_for_machine("plan_search"), result))


def case(machine_name: str, new_tokens: int, padded: bool) -> dict[str, Any]:
    """One machine and workload: the planner's choice beside the grid's best."""
    machine, layout = load_machine(machine_name), weight_layout(SHAPES["mixtral-8x7b"])
    lengths = load_workload("mtbench").lengths(MOST_REQUESTS)
    if padded:
        lengths = [max(lengths)] * len(lengths)
    started = perf_counter()
    chosen = plan_best(machine, layout, lengths, new_tokens)
    seconds = perf_counter() - started
    best = max(grid(machine_name, lengths, new_tokens), key=lambda each: each["tokens_per_second"])
    return {
        "machine": machine_name,
        "new_tokens": new_tokens,
        "padded": padded,
        "search_seconds": round(seconds, 2),
        "chosen": {
            "policy": chosen.policy,
            "micro_batch_size": chosen.seen.micro_batch_size,
            "batch_size": chosen.seen.batch_size,
            "tokens_per_second": round(chosen.seen.throughput, 2),
        },
        "best_of_grid": best,
        "regret": round(max(0.0, best["tokens_per_second"] / chosen.seen.throughput - 1), 4),
    }


def grid(machine_name: str, lengths: list[int], new_tokens: int) -> Iterator[dict[str, Any]]:
    """All that fits of the grid."""
    machine, layout = load_machine(machine_name), weight_layout(SHAPES["mixtral-8x7b"])
    for name in POLICIES:
        setting = Setting(
            make=find("policies", name),
            machine=machine,
            layout=layout,
            lengths=tuple(lengths),
            new_tokens=new_tokens,
            cost=cost_model(machine, layout.dtype),
            budgets={},
        )
        for size in MICRO_BATCHES:
            for count in COUNTS:
                if size * count > len(lengths):
                    break
                batch = setting.batch(count, size)
                try:
                    plan, policy = setting.plan(batch)
                except BadInput:
                    break
                seen = preview(plan, policy, setting.cost)
                yield {
                    "policy": name,
                    "micro_batch_size": size,
                    "batch_size": len(batch.prompts),
                    "tokens_per_second": round(seen.tokens_per_second(batch), 2),
                }


def command_seconds() -> float:
    """The whole command, from its start to its end."""
    started = perf_counter()
    subprocess.run([sys.executable, "-m", "moesched", *COMMAND], check=True, capture_output=True)
    return round(perf_counter() - started, 2)


if __name__ == "__main__":
    main()
