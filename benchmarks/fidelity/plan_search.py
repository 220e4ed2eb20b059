"""Compare the planner's choice with the best of a fixed grid of policies, sizes and counts, for each objective.

For Mixtral 8x7B, Qwen3-30B-A3B and DBRX (of 16 bits, which fits none, and of 4) on four machines the planner searches
and picks. Then every policy is looked at with micro-batches of 64, 128 and 256 requests and, where it splits the KV
cache, with none, a fifth and all of that on the accelerator, each with as many micro-batches as memory has room for
and with 60 % of them. The grid is looked at in a few layers first; what comes near the best of it is simulated with
all layers, as the planner's choice is. For one request the grid is that of policies and shares, of which half is one,
too. Regret is how much more the best of the grid reaches than the planner's choice, in the figure of the objective.
Where no policy fits, the time of finding out is measured. Seconds of a search are those of the processor, since a
search is one thread that waits for nothing, and other programs may run meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from time import process_time
from typing import Any, NamedTuple, get_args

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most
from moesched.errors import BadInput, DoesNotFit
from moesched.inputs.defaults import WORKLOAD
from moesched.inputs.lookup import find_shape
from moesched.inputs.options import Objective
from moesched.machines import Machine, load_machine
from moesched.machines.changes import changed
from moesched.machines.cost import cost_model
from moesched.models.layout import WeightLayout, room_for, weight_layout
from moesched.planner import Best, Setting, plan_best, plannable, splits_kv
from moesched.planner.candidate import Candidate
from moesched.planner.objectives import requests_for
from moesched.planner.proposal import MOST_REQUESTS
from moesched.planner.schedules import Point, Seen, resident_of
from moesched.plugins import find
from moesched.requests.workloads import load_workload

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "dbrx", "dbrx q4_k_m")
"""Names of models, some with a storage format."""
DESKTOP = (
    "memory.host.capacity=128GB",
    "memory.host.bandwidth=80GB/s",
    "memory.gpu.capacity=24GB",
    "memory.gpu.bandwidth=936GB/s",
)
"""Changes that make an L4's machine a desktop with an RTX 3090 and two channels of DDR5-5000."""
MACHINES = ("t4", "l4", "rtx6000", "24 GB desktop")
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
NEW_TOKENS = load_workload(WORKLOAD).new_tokens[0]
"""Those of `moesched plan` by default."""
SIZES = (64, 128, 256)
MOST_MICRO_BATCHES = 48
PARTS = (1.0, 0.6)
"""Of the most micro-batches that fit."""
SHARES = (0.0, 0.2, 1.0)
SHARES_OF_ONE = (0.0, 0.2, 0.5, 1.0)
NEAR = 1.15
"""Factor below the best of the grid up to which a schedule is simulated with all layers."""
MOST_DEEP = 4


class Case(NamedTuple):
    """A question to the planner."""

    model: str
    machine: str
    objective: Objective

    @property
    def name(self) -> str:
        """The name of the part of the benchmark."""
        return f"{self.model} on {self.machine}, {self.objective}"


CASES = [Case(*each) for each in product(MODELS, MACHINES, OBJECTIVES)]


def claims(result: Result) -> Iterator[Claim]:
    """The planner's choice against a grid, by objective."""
    worst = result["worst_regret"]
    if not isinstance(worst, dict):  # five policies, for throughput
        yield Claim("planner's choice below the best of a grid, worst model", f"{100 * worst:.1f} %")
        yield Claim("a search of the planner, Mixtral 8x7B", f"{result['search_seconds']:.1f} s")
        return
    for objective, regret in worst.items():
        words = f"planner's choice below the best of a grid for {objective}, worst of the models and machines"
        yield at_most(words, 100 * regret, 3, "{:.1f} %")
    yield at_most("a search of the planner, slowest", result["most_search_seconds"], 10, "{:.1f} s")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=[case.name for case in CASES],
    rounds_help="timed searches; medians count",
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Search and try the grid, which takes long, case by case; each result joins those of earlier runs at once."""
    options = BENCHMARK.parse(arguments)
    for case in track([case for case in CASES if case.name in options.only], "planning", still=True):
        best, seconds = search(case, options.rounds)
        write(case, compared(case, best, seconds))


def write(case: Case, done: dict[str, Any]) -> None:
    """Put a case's result to the others, in the order of the cases."""
    stored = BENCHMARK.stored().get("cases", [])
    known = {tuple(each.get(field) for field in Case._fields): each for each in stored}
    known[case] = done
    cases = [known[each] for each in CASES if each in known]
    worst = {
        objective: max(
            (each["regret"] for each in cases if each["objective"] == objective and "regret" in each),
            default=0.0,
        )
        for objective in OBJECTIVES
    }
    BENCHMARK.write(
        {
            "workload": WORKLOAD,
            "new_tokens": NEW_TOKENS,
            "cases": cases,
            "worst_regret": worst,
            "most_search_seconds": max(each["search_seconds"] for each in cases),
        }
    )


def search(case: Case, rounds: int) -> tuple[Best | None, float]:
    """The planner's choice, None where nothing fits, and the median seconds of the processor of finding it."""
    times, best = [], None
    layout = layout_named(case.model)
    for _ in range(rounds):
        started = process_time()
        try:
            best = plan_best(
                machine_named(case.machine),
                layout,
                _lengths(),
                NEW_TOKENS,
                objective=case.objective,
                slot_bytes=room_for,
            )
        except DoesNotFit:
            best = None
        times.append(process_time() - started)
    return best, median(times)


def compared(case: Case, best: Best | None, seconds: float) -> dict[str, Any]:
    """The planner's choice beside the grid's best."""
    about = {**case._asdict(), "search_seconds": round(seconds, 2)}
    if best is None:
        return {**about, "fits": False}
    of_grid = max(_deepened(case), key=lambda found: found[1].rate)
    name, seen = of_grid
    return {
        **about,
        "fits": True,
        "chosen": _figures(best.policy, best.seen),
        "best_of_grid": _figures(name, seen),
        "regret": round(max(0.0, seen.rate / best.seen.rate - 1), 4),
    }


def machine_named(name: str) -> Machine:
    """A machine of the grid."""
    return changed(load_machine("l4"), DESKTOP) if name == "24 GB desktop" else load_machine(name)


def layout_named(name: str) -> WeightLayout:
    """The weights of a model of the grid."""
    model, _, stored_as = name.partition(" ")
    return weight_layout(find_shape(model, stored_as or None))


def _figures(policy: str, seen: Seen) -> dict[str, Any]:
    return {
        "policy": policy,
        "micro_batch_size": seen.micro_batch_size,
        "batch_size": seen.batch_size,
        "kv_on_gpu": round(seen.kv_on_gpu, 3),
        "tokens_per_second": round(seen.throughput, 3),
        "decode_step_seconds": round(seen.trial_run.step_seconds, 5),
        "first_token_seconds": round(seen.trial_run.first_token_seconds, 4),
    }


def _deepened(case: Case) -> Iterator[tuple[str, Seen]]:
    """The best schedules of the grid, simulated with all layers."""
    found = sorted(grid(case), key=lambda each: each[1].rate, reverse=True)
    most = found[0][1].rate
    near = [each for each in found[:MOST_DEEP] if each[1].rate * NEAR >= most]
    for candidate, seen in near:
        yield candidate.name, candidate.schedules.deepened(seen)


def grid(case: Case) -> Iterator[tuple[Candidate, Seen]]:
    """All that fits of the grid."""
    machine, layout = machine_named(case.machine), layout_named(case.model)
    for name in plannable():
        policy = find("policies", name)
        setting = Setting(
            make=partial(policy),
            machine=machine,
            layout=layout,
            lengths=requests_for(case.objective, _lengths()),
            new_tokens=NEW_TOKENS,
            cost=cost_model(machine, layout.dtype),
            slot_bytes=room_for,
            splits_kv=splits_kv(policy, machine),
            objective=case.objective,
        )
        try:
            candidate = Candidate(name, setting)
        except BadInput:
            continue
        one = case.objective != "throughput"
        shares = (SHARES_OF_ONE if one else SHARES) if setting.splits_kv else (0.0,)
        for share, size in product(shares, (1,) if one else SIZES):
            yield from _of_size(candidate, size, share)


def _of_size(candidate: Candidate, size: int, share: float) -> Iterator[tuple[Candidate, Seen]]:
    """Several numbers of micro-batches of a size; a share that comes to no whole micro-batch is left out."""
    setting = candidate.setting
    counts = range(1, min(MOST_MICRO_BATCHES, max(1, len(setting.lengths) // size)) + 1)
    most = bisect_left(counts, True, key=lambda count: not _fits(setting, count, size, share))
    for count in sorted({max(1, round(part * most)) for part in PARTS}) if most else ():
        resident = resident_of(share, count)
        if resident or not share:
            yield candidate, candidate.schedules.see(Point(size, count, resident))


def _fits(setting: Setting, count: int, size: int, share: float) -> bool:
    try:
        setting.plan(setting.batch(count, size), kv_on_gpu=share if setting.splits_kv else None)
    except BadInput:
        return False
    return True


def _lengths() -> list[int]:
    return load_workload(WORKLOAD).lengths(MOST_REQUESTS)


if __name__ == "__main__":
    main()
