"""The planner beside exhaustive searches and beside the simulator, for models, machines and objectives.

Each case is searched by the planner, which is timed by the processor: a search is one thread that waits for nothing.
Then all policies are looked at in a grid of sizes, numbers of micro-batches, chunks of prefill and, where they split
the KV cache, shares of it: in a few layers first; what comes near the best is simulated with all layers, as the
planner's own sizes are. One request has no sizes to choose. Three questions follow:

choice: how much more the best of the grid reaches than the planner's choice, in the figure of the objective;
sizes: how much more a policy reaches with the best sizes of the grid than with those that the planner finds for it;
table: how far the rows of the plan's table that are no estimates are from `simulate` with their sizes, whether a later
row beats the first by more than 5 %, and whether a plan predicts more than its own bound.

Each case joins those of earlier runs in the result at once. Where no policy fits, only the search is timed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from statistics import median
from time import process_time
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, none_of
from moesched.errors import BadInput, DoesNotFit
from moesched.inputs.defaults import WORKLOAD
from moesched.inputs.lookup import find_shape
from moesched.inputs.options import Objective
from moesched.jobs.simulate_model import simulate_model
from moesched.machines import Machine, load_machine
from moesched.machines.build import Parts, build_machine
from moesched.machines.cost import cost_model
from moesched.models.layout import room_for, weight_layout
from moesched.planner.candidate import Candidate
from moesched.planner.chunks import CHUNK
from moesched.planner.objectives import requests_for
from moesched.planner.proposal import MOST_REQUESTS
from moesched.planner.ranking import Ranked
from moesched.planner.schedules import Schedule, SchedulePoint, resident_of
from moesched.planner.search_policies import BestPlan, plan_best, plannable
from moesched.planner.setting import KV_SHARE, Setting, splits_kv
from moesched.plugins import find
from moesched.requests.workloads import Workload, load_workload

MODELS = (
    "olmoe-1b-7b",
    "mixtral-8x7b",
    "mixtral-8x7b q4_k_m",
    "qwen3-30b-a3b",
    "gpt-oss-120b",
    "dbrx q4_k_m",
)
"""Names of models, some with a storage format."""
DESKTOP = "RTX 3090"
MACHINES = ("t4", "l4", "rtx6000", DESKTOP)
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
WORK = load_workload(WORKLOAD)
SIZED = ("expert_cache", "hybrimoe", "twiddler", "cgopipe", "flexgen")
"""Policies whose own sizes are compared."""
SIZES = (16, 64, 128, 256)
MOST_MICRO_BATCHES = 48
FILLED = (1.0, 0.6)
"""Shares of the most micro-batches that fit."""
SHARES = {"throughput": (0.0, 0.2, 1.0), "one request": (0.0, 0.2, 0.5, 1.0)}
NEAR = 1.15
"""Factor below the best of the grid up to which a schedule is simulated with all layers."""
MOST_DEEP = 4
BETTER = 1.05
"""Factor by which a row must be faster than the first to count as the better one."""


class Case(NamedTuple):
    """A question to the planner."""

    model: str
    machine: str
    objective: Objective

    @property
    def name(self) -> str:
        """The name of the part of the benchmark."""
        return f"{self.model} on {self.machine}, {self.objective}"

    @property
    def shape(self) -> tuple[str, str | None]:
        """The model's name and its storage format."""
        model, _, stored_as = self.model.partition(" ")
        return model, stored_as or None

    @property
    def described(self) -> Machine:
        """The machine, of a name or of parts."""
        if self.machine == DESKTOP:
            return build_machine(Parts(gpu=DESKTOP, cpu="Ryzen 7950X", ram="128GB DDR5-5200")).machine
        return load_machine(self.machine)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the prompts that the objective is for."""
        return requests_for(self.objective, WORK.lengths(MOST_REQUESTS))

    def setting(self, policy: str) -> Setting:
        """A policy's schedules of the case."""
        machine, layout, cls = (
            self.described,
            weight_layout(find_shape(*self.shape)),
            find("policies", policy),
        )
        return Setting(
            make=partial(cls),
            machine=machine,
            layout=layout,
            lengths=self.lengths,
            new_tokens=WORK.new_tokens[0],
            cost=cost_model(machine, layout.dtype),
            slot_bytes=room_for,
            splits_kv=splits_kv(cls, machine),
            objective=self.objective,
        )


CASES = {case.name: case for case in (Case(*each) for each in product(MODELS, MACHINES, OBJECTIVES))}


def claims(result: Result) -> Iterator[Claim]:
    """The planner beside a grid and beside `simulate`."""
    cases = [case for case in result["cases"] if case["fits"]]
    for objective in OBJECTIVES:
        regrets = [case["regret"] for case in cases if case["objective"] == objective]
        words = f"planner's choice below the best of a grid for {objective}, worst of the models and machines"
        yield at_most(words, 100 * max(regrets, default=0.0), 3, "{:.1f} %")
    worst = max((case["regret_of_sizes"] for case in cases), default=0.0)
    yield at_most("sizes that are not given below the best of a grid, worst", 100 * worst, 5, "{:.1f} %")
    slowest = max(case["search_seconds"] for case in result["cases"])
    yield at_most("a search of the planner, slowest", slowest, 10, "{:.1f} s")
    wrong = sum(case["lost_by_first"] > BETTER - 1 for case in cases)
    yield none_of(
        "tables of `plan` whose first row is over 5 % slower than another, simulated", wrong, len(cases)
    )
    wrong = sum(case["bound_over_predicted"] < 1 for case in cases)
    yield none_of("plans that predict more than their own bound", wrong, len(cases))
    rows, error = (
        sum(case["rows"] for case in cases),
        max((case["worst_error"] for case in cases), default=0.0),
    )
    words = f"rows of `plan` that are no estimates, against `simulate`, worst of {rows}"
    yield at_most(words, 100 * error, 3, "{:.2g} %")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=CASES,
    rounds_help="timed searches; medians count",
    keeps_parts=True,
    replaces=("plan_search", "plan_table", "default_sizes"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Search and try the grid, which takes long, case by case."""
    options = BENCHMARK.parse(arguments)
    for name in track(options.only, "planning", still=True):
        BENCHMARK.write({"cases": BENCHMARK.joined("cases", name, judged(CASES[name], options.rounds))})


def judged(case: Case, rounds: int) -> dict[str, Any]:
    """The planner's answer to a case, beside the grid's and the simulator's."""
    times, best = [], None
    for _ in range(rounds):
        started = process_time()
        best = searched(case)
        times.append(process_time() - started)
    about = {**case._asdict(), "search_seconds": round(median(times), 2), "fits": best is not None}
    return about if best is None else {**about, **beside_grid(case, best), **beside_simulate(case, best)}


def searched(case: Case) -> BestPlan | None:
    """The planner's choice; None where nothing fits."""
    layout = weight_layout(find_shape(*case.shape))
    lengths = WORK.lengths(MOST_REQUESTS)
    with suppress(DoesNotFit):
        return plan_best(
            case.described, layout, lengths, WORK.new_tokens[0], objective=case.objective, slot_bytes=room_for
        )
    return None


# -- the grid --------------------------------------------------------------------------------------


def beside_grid(case: Case, best: BestPlan) -> dict[str, Any]:
    """The regrets of the planner's choice, and of its sizes for some policies."""
    of_policies: dict[str, tuple[Candidate, list[Schedule]]] = {}
    for name in plannable():
        with suppress(BadInput):
            candidate = Candidate(name, case.setting(name))
            if schedules := list(grid(candidate)):
                of_policies[name] = candidate, schedules
    every = [(candidate, each) for candidate, schedules in of_policies.values() for each in schedules]
    chosen = deepened(every)
    sizes = {}
    for name in SIZED if case.objective == "throughput" else ():
        if name in of_policies:
            candidate, schedules = of_policies[name]
            own = candidate.schedules.deepened(candidate.search())
            sizes[name] = regret(deepened([(candidate, each) for each in schedules])[1], own)
    return {
        "chosen": figures(best.policy, best.schedule),
        "best_of_grid": figures(chosen[0].name, chosen[1]),
        "regret": regret(chosen[1], best.schedule),
        "regrets_of_sizes": sizes,
        "regret_of_sizes": max(sizes.values(), default=0.0),
    }


def grid(candidate: Candidate) -> Iterator[Schedule]:
    """All that fits of a policy's grid, in a few layers."""
    setting = candidate.setting
    many = setting.objective == "throughput"
    shares = SHARES["throughput" if many else "one request"] if setting.splits_kv else (0.0,)
    for size, share in product(SIZES if many else (1,), shares):
        most = most_fitting(setting, size, share)
        for count in sorted({max(1, round(part * most)) for part in FILLED}) if most else ():
            resident = resident_of(share, count)
            chunks = (None, CHUNK) if size * max(setting.lengths) > CHUNK else (None,)
            for chunk in chunks if resident or not share else ():
                with suppress(BadInput):
                    yield candidate.schedules.at(SchedulePoint(size, count, resident, chunk))


def most_fitting(setting: Setting, size: int, share: float) -> int:
    """The most micro-batches of a size that fit."""

    def too_many(count: int) -> bool:
        try:
            setting.plan(setting.batch(count, size), kv_on_gpu=share if setting.splits_kv else None)
        except BadInput:
            return True
        return False

    counts = range(1, min(MOST_MICRO_BATCHES, max(1, len(setting.lengths) // size)) + 1)
    return bisect_left(counts, True, key=too_many)


def deepened(schedules: Sequence[tuple[Candidate, Schedule]]) -> tuple[Candidate, Schedule]:
    """The best of several schedules, of those near it with all layers."""
    found = sorted(schedules, key=lambda each: each[1].rate, reverse=True)
    near = [each for each in found[:MOST_DEEP] if each[1].rate * NEAR >= found[0][1].rate]
    whole = [(candidate, candidate.schedules.deepened(each)) for candidate, each in near]
    return max(whole, key=lambda each: each[1].rate)


def regret(best: Schedule, own: Schedule) -> float:
    """The relative advantage of the best; 0 if it has none."""
    return round(max(0.0, best.rate / own.rate - 1), 4)


def figures(policy: str, schedule: Schedule) -> dict[str, Any]:
    """A schedule's sizes, and what it reaches."""
    return {
        "policy": policy,
        "micro_batch_size": schedule.micro_batch_size,
        "batch_size": schedule.batch_size,
        "prefill_chunk": schedule.chunk,
        "kv_on_gpu": round(schedule.kv_on_gpu, 3),
        "tokens_per_second": round(schedule.throughput, 3),
        "decode_step_seconds": round(schedule.trial_run.step_seconds, 5),
        "first_token_seconds": round(schedule.trial_run.first_token_seconds, 4),
    }


# -- the table -------------------------------------------------------------------------------------


def beside_simulate(case: Case, best: BestPlan) -> dict[str, Any]:
    """The rows of the plan's table beside `simulate`; rows with equal sizes and figures are one schedule."""
    fitting = [row for row in best.ranking if row.fits]
    simulated: dict[str, float] = {}
    rates = []
    for row in fitting:
        schedule = repr(replace(row, policy="", gain=None))
        if schedule not in simulated:
            simulated[schedule] = simulated_rate(case, row)
        rates.append(simulated[schedule])
    errors = [
        abs(rate / row.throughput_tokens_per_second - 1)
        for row, rate in zip(fitting, rates, strict=True)
        if row.throughput_tokens_per_second and not row.estimate
    ]
    return {
        "rows": len(errors),
        "estimates": len(fitting) - len(errors),
        "worst_error": round(max(errors, default=0.0), 4),
        "lost_by_first": round(max(rates) / rates[0] - 1, 4) if case.objective != "latency" else 0.0,
        "bound_over_predicted": round(best.schedule.bound / best.schedule.throughput, 4),
    }


def simulated_rate(case: Case, row: Ranked) -> float:
    """Tokens per second with a row's sizes."""
    model, stored_as = case.shape
    shares = {KV_SHARE: row.kv_on_gpu} if row.kv_on_gpu is not None else {}
    one = Workload(name="one request", new_tokens=WORK.new_tokens, prompt_tokens=case.lengths)
    return simulate_model(
        model,
        machine=case.described,
        policy=find("policies", row.policy),
        workload=WORK if case.objective == "throughput" else one,
        format=stored_as,
        batch_size=row.batch_size,
        micro_batch_size=row.micro_batch_size,
        prefill_chunk=row.prefill_chunk,
        settings=shares,
        band=False,
    ).throughput_tokens_per_second


if __name__ == "__main__":
    main()
