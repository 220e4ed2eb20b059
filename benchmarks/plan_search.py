"""Compare the planner's choice with the best of a grid of sizes, each looked at on the virtual clock.

For Mixtral 8x7B on several machines, padded and not, the planner searches and picks. Then every shipped policy that it
chooses from is looked at with every size of micro-batches and, where it splits the KV cache, several shares of that on
the accelerator, each with as many micro-batches as memory has room for and with fewer. Mixtral 8x22B over four T4s is
there for the share: host memory bounds the batch. Regret is how much more the best of the grid reaches than the
planner's choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from _options import SIMULATION, Benchmark, track

from moesched.errors import BadInput
from moesched.inputs.accelerators import cut_over_ranks
from moesched.machines import Machine, load_machine
from moesched.machines.cost import cost_model
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner import POLICIES, Best, Setting, plan_best, splits_kv
from moesched.planner.trial_run import trial_run
from moesched.plugins import find
from moesched.requests.workloads import load_workload

CASES = [
    ("mixtral-8x7b", "t4", 128, False),
    ("mixtral-8x7b", "t4", 128, True),
    ("mixtral-8x7b", "l4", 64, True),
    ("mixtral-8x7b", "a100-80g", 32, False),
    ("mixtral-8x22b", "t4x4", 128, False),
]
"""Model, machine, tokens to generate, whether prompts are padded to the longest."""
MICRO_BATCHES = (4, 8, 16, 32, 64, 96, 128, 192, 256)
MOST_MICRO_BATCHES = 48
PARTS = (1.0, 0.75, 0.5, 0.25)
"""Of the most micro-batches that fit."""
SHARES = (0.0, 0.05, 0.15, 0.4, 1.0)
MOST_REQUESTS = 4096


class Search(NamedTuple):
    """One model, machine and workload, with what the planner chose for it."""

    model: str
    machine_name: str
    new_tokens: int
    padded: bool
    machine: Machine
    layout: WeightLayout
    lengths: list[int]
    budgets: dict[str, int]
    chosen: Best
    seconds: float


BENCHMARK = Benchmark(
    __doc__,
    "plan_search",
    measures=(*SIMULATION, "moesched/planner"),
    parts=[
        f"{model} on {machine}, {new_tokens} tokens{', padded' if padded else ''}"
        for model, machine, new_tokens, padded in CASES
    ],
    rounds_help="timed searches; medians count",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Search everywhere, which is timed, then try the grids, which takes long, and write both."""
    options = BENCHMARK.parse(arguments)
    chosen = [case for part, case in zip(BENCHMARK.parts, CASES, strict=True) if part in options.only]
    searches = [search(*each, options.rounds) for each in track(chosen, "planning", still=True)]
    cases = [compared(each) for each in track(searches, "trying the grid")]
    times = [each["search_seconds"] for each in cases if each["model"] == "mixtral-8x7b"]
    BENCHMARK.write(
        {
            "workload": "mtbench",
            "cases": cases,
            "worst_regret": max(each["regret"] for each in cases),
            "search_seconds": median(times) if times else None,
        }
    )


def search(model: str, machine_name: str, new_tokens: int, padded: bool, rounds: int) -> Search:
    """The planner's choice, and the median seconds of finding it."""
    config, machine, budgets = cut_over_ranks(SHAPES[model], load_machine(machine_name), None, None)
    layout = weight_layout(config)
    lengths = load_workload("mtbench").lengths(MOST_REQUESTS)
    if padded:
        lengths = [max(lengths)] * len(lengths)
    times = []
    for _ in range(rounds):
        started = perf_counter()
        chosen = plan_best(machine, layout, lengths, new_tokens, budgets=budgets)
        times.append(perf_counter() - started)
    return Search(
        model, machine_name, new_tokens, padded, machine, layout, lengths, budgets, chosen, median(times)
    )


def compared(searched: Search) -> dict[str, Any]:
    """The planner's choice beside the grid's best."""
    machine, layout, chosen = searched.machine, searched.layout, searched.chosen
    tried = grid(machine, layout, searched.lengths, searched.new_tokens, searched.budgets)
    best = max(tried, key=lambda each: each["tokens_per_second"])
    return {
        "model": searched.model,
        "machine": searched.machine_name,
        "new_tokens": searched.new_tokens,
        "padded": searched.padded,
        "search_seconds": round(searched.seconds, 2),
        "chosen": {
            "policy": chosen.policy,
            "micro_batch_size": chosen.seen.micro_batch_size,
            "batch_size": chosen.seen.batch_size,
            "kv_on_gpu": round(chosen.seen.kv_on_gpu, 3),
            "tokens_per_second": round(chosen.seen.throughput, 2),
        },
        "best_of_grid": best,
        "regret": round(max(0.0, best["tokens_per_second"] / chosen.seen.throughput - 1), 4),
    }


def grid(
    machine: Machine, layout: WeightLayout, lengths: list[int], new_tokens: int, budgets: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """All that fits of the grid."""
    for name in POLICIES:
        policy = find("policies", name)
        setting = Setting(
            make=policy,
            machine=machine,
            layout=layout,
            lengths=tuple(lengths),
            new_tokens=new_tokens,
            cost=cost_model(machine, layout.dtype),
            budgets=budgets,
            splits_kv=splits_kv(policy, machine),
        )
        for share, size in product(SHARES if setting.splits_kv else (None,), MICRO_BATCHES):
            yield from _of_size(name, setting, size, share)


def _of_size(name: str, setting: Setting, size: int, share: float | None) -> Iterator[dict[str, Any]]:
    """Several numbers of micro-batches of a size; a share that comes to no whole micro-batch is left out."""
    counts = range(1, min(MOST_MICRO_BATCHES, len(setting.lengths) // size) + 1)
    most = bisect_left(counts, True, key=lambda count: not _fits(setting, count, size, share))
    for count in sorted({max(1, round(part * most)) for part in PARTS}) if most else ():
        if share and not round(share * count):
            continue
        batch = setting.batch(count, size)
        plan, policy = setting.plan(batch, kv_on_gpu=share)
        yield {
            "policy": name,
            "micro_batch_size": size,
            "batch_size": len(batch.prompts),
            "kv_on_gpu": round(plan.kv.on_gpu, 3),
            "tokens_per_second": round(trial_run(plan, policy, setting.cost).tokens_per_second(batch), 2),
        }


def _fits(setting: Setting, count: int, size: int, share: float | None) -> bool:
    try:
        setting.plan(setting.batch(count, size), kv_on_gpu=share)
    except BadInput:
        return False
    return True


if __name__ == "__main__":
    main()
