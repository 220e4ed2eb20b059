"""Compare the planner's sizes of one policy with the best of a grid of sizes that somebody could type.

Each case is a policy, a model, a machine and a prompt length. The grid has ten sizes of micro-batches, ten numbers of
them and, for long micro-batches, prompts whole and in chunks; a few layers of each that fits are simulated, and all
layers of the best. Regret is how much more the best of the grid reaches than the planner's sizes, in tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from statistics import median
from time import process_time
from typing import Any, NamedTuple

from benchmarks.fidelity.plan_search import layout_named, machine_named
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most
from moesched.errors import BadInput
from moesched.machines.cost import cost_model
from moesched.models.layout import room_for
from moesched.planner import Setting, splits_kv
from moesched.planner.candidate import Candidate
from moesched.planner.climb import CHUNK
from moesched.planner.schedules import Point, Schedules, Seen
from moesched.plugins import find

POLICIES = ("expert_cache", "hybrimoe", "twiddler", "cgopipe", "flexgen")
PLACES = (("mixtral-8x7b", "t4"), ("qwen3-30b-a3b", "l4"), ("mixtral-8x7b q4_k_m", "24 GB desktop"))
PROMPTS = (100, 2048)
MICRO_BATCHES = (1, 4, 8, 16, 32, 48, 64, 96, 128, 256)
COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)
REQUESTS = 8192
NEW_TOKENS = 32
FINALISTS = 2
"""Schedules of the grid of which all layers are simulated."""


class Case(NamedTuple):
    """A policy that needs sizes."""

    policy: str
    model: str
    machine: str
    prompt: int

    @property
    def name(self) -> str:
        """The name of the part of the benchmark."""
        return f"{self.policy}, {self.model} on {self.machine}, {self.prompt} tokens"


CASES = [
    Case(policy, model, machine, prompt)
    for (model, machine), prompt, policy in product(PLACES, PROMPTS, POLICIES)
]


def claims(result: Result) -> Iterator[Claim]:
    """The planner's sizes of one policy against a grid of sizes."""
    words = (
        f"sizes that are not given below the best of a grid of 200, worst of {len(result['cases'])} settings"
    )
    yield at_most(words, 100 * result["worst_regret"], 5, "{:.1f} %")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=[case.name for case in CASES],
    rounds=1,
    rounds_help="timed searches; medians count",
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Search and try the grid, case by case; each result joins those of earlier runs at once."""
    options = BENCHMARK.parse(arguments)
    for case in track([case for case in CASES if case.name in options.only], "sizing", still=True):
        _write(case, _compared(case, options.rounds))


def _write(case: Case, done: dict[str, Any]) -> None:
    stored = BENCHMARK.stored().get("cases", [])
    known = {Case(*(each[field] for field in Case._fields)): each for each in stored} | {case: done}
    cases = [known[each] for each in CASES if each in known]
    BENCHMARK.write({"cases": cases, "worst_regret": max(each["regret"] for each in cases)})


def _compared(case: Case, rounds: int) -> dict[str, Any]:
    """The planner's sizes beside the grid's best."""
    times = []
    for _ in range(rounds):
        started = process_time()
        chosen = Candidate(case.policy, _setting(case)).look()
        times.append(process_time() - started)
    seen, schedules = list(_grid(case)), Schedules(_setting(case), deep=False)
    few = sorted(seen, key=lambda each: each.rate, reverse=True)[:FINALISTS]
    best = max(map(schedules.deepened, few), key=lambda each: each.rate)
    chosen = schedules.deepened(chosen)
    return {
        **case._asdict(),
        "search_seconds": round(median(times), 2),
        "sizes_in_grid": len(seen),
        "chosen": _figures(chosen),
        "best_of_grid": _figures(best),
        "regret": round(max(0.0, best.rate / chosen.rate - 1), 4),
    }


def _grid(case: Case) -> Iterator[Seen]:
    """All sizes of the grid that fit, each once."""
    schedules, tried = Schedules(_setting(case), deep=False), set()
    for size, chunk in product(MICRO_BATCHES, (None, CHUNK)):
        if chunk is not None and size * case.prompt <= chunk:
            continue
        for count in COUNTS:
            with suppress(BadInput):
                seen = schedules.see(Point(size, count, 0, chunk))
                if seen.point not in tried:
                    tried.add(seen.point)
                    yield seen
                if seen.point.micro_batches < count:
                    break


def _setting(case: Case) -> Setting:
    machine, layout, policy = (
        machine_named(case.machine),
        layout_named(case.model),
        find("policies", case.policy),
    )
    return Setting(
        make=partial(policy),
        machine=machine,
        layout=layout,
        lengths=(case.prompt,) * REQUESTS,
        new_tokens=NEW_TOKENS,
        cost=cost_model(machine, layout.dtype),
        slot_bytes=room_for,
        splits_kv=splits_kv(policy, machine),
    )


def _figures(seen: Seen) -> dict[str, Any]:
    return {
        "micro_batch_size": seen.micro_batch_size,
        "batch_size": seen.batch_size,
        "prefill_chunk": seen.chunk,
        "kv_on_gpu": round(seen.kv_on_gpu, 3),
        "tokens_per_second": round(seen.throughput, 3),
    }


if __name__ == "__main__":
    main()
