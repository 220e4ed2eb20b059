"""Compare each row of `plan`'s table with `simulate` of the policy with the row's sizes.

Each case is a model, a machine and an objective. A row's error is that of its figure for the objective: tokens per
second of a batch, or the time of one request's answer. The first place is wrong where the first row, simulated, is more
than 5 % slower than another row. Of rows with equal sizes and figures, which are one schedule, the first is simulated.
No bound of a plan may be below its prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from time import process_time
from typing import Any

from msgspec.structs import replace

from benchmarks.fidelity.plan_search import Case, machine_named
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, none_of
from moesched.errors import DoesNotFit
from moesched.inputs.defaults import WORKLOAD
from moesched.inputs.options import Objective
from moesched.jobs.simulate_model import simulate_model
from moesched.machines import Machine
from moesched.machines.build import Parts, build_machine
from moesched.planner import plan_model
from moesched.planner.objectives import requests_for
from moesched.planner.proposal import MOST_REQUESTS
from moesched.planner.ranking import Ranked
from moesched.planner.setting import KV_SHARE
from moesched.plugins import find
from moesched.requests.workloads import Workload, load_workload

MODELS = (
    "olmoe-1b-7b",
    "mixtral-8x7b",
    "mixtral-8x7b q4_k_m",
    "qwen3-30b-a3b",
    "qwen3-30b-a3b q4_k_m",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "qwen3.5-35b-a3b q4_k_m",
)
"""Names of models, some with a storage format."""
BUILT = {
    "RTX 3090": Parts(gpu="RTX 3090", cpu="Ryzen 7950X", ram="128GB DDR5-5200"),
}
"""Machines of parts."""
MACHINES = ("t4", "l4", "rtx6000", "a100-80g", *BUILT)
OBJECTIVES: tuple[Objective, ...] = ("interactive", "throughput")
WIDE = 1.05
"""Factor by which a row must be faster than the first to count as the better one."""


CASES = [
    Case(model, machine, objective) for objective, model, machine in product(OBJECTIVES, MODELS, MACHINES)
]


def claims(result: Result) -> Iterator[Claim]:
    """`plan`'s table against `simulate` of each row."""
    words = "tables of `plan` whose first row is over 5 % slower than another, simulated"
    yield none_of(words, result["wrong_first_places"], result["ranked"])
    words = "plans that predict more than their own bound"
    yield none_of(words, result["bounds_below_predictions"], result["ranked"])
    words = f"rows of `plan` that are no estimates, against `simulate`, worst of {result['rows'] - result['estimates']}"
    yield at_most(words, 100 * result["worst_error"], 3, "{:.2g} %")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=[case.name for case in CASES],
    by_machine=False,
    keeps_parts=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and simulate, case by case; each result joins those of earlier runs at once."""
    options = BENCHMARK.parse(arguments)
    for case in track([case for case in CASES if case.name in options.only], "planning", still=True):
        _write(case, _compared(case))


def _write(case: Case, done: dict[str, Any]) -> None:
    stored = BENCHMARK.stored().get("cases", [])
    known = {Case(*(each[field] for field in Case._fields)): each for each in stored} | {case: done}
    cases = [known[each] for each in CASES if each in known]
    BENCHMARK.write(
        {
            "workload": WORKLOAD,
            "cases": cases,
            "ranked": sum(each["rows"] > 0 for each in cases),
            "wrong_first_places": sum(each.get("lost_by_first", 0) > WIDE - 1 for each in cases),
            "bounds_below_predictions": sum(each.get("bound_over_predicted", 1.0) < 1.0 for each in cases),
            "worst_error": max(each.get("worst_error", 0.0) for each in cases),
            "worst_error_of_estimates": max(each.get("worst_error_of_estimates", 0.0) for each in cases),
            "estimates": sum(each.get("estimates", 0) for each in cases),
            "rows": sum(each["rows"] for each in cases),
        }
    )


def _compared(case: Case) -> dict[str, Any]:
    """The table's rows beside their simulations."""
    started = process_time()
    try:
        proposal = plan_model(
            _model(case), machine=_machine(case.machine), format=_format(case), objective=case.objective
        )
    except DoesNotFit:
        return {**case._asdict(), "rows": 0}
    ranking, predicted = proposal.ranking, proposal.predicted
    bound = predicted.bound_tokens_per_second / predicted.throughput_tokens_per_second
    about = {
        **case._asdict(),
        "plan_seconds": round(process_time() - started, 2),
        "bound_over_predicted": round(bound, 4),
    }
    simulated: dict[str, float] = {}
    rows = []
    for row in ranking:
        if row.fits:
            schedule = repr(replace(row, policy="", gain=None))
            if schedule not in simulated:
                simulated[schedule] = _simulated_rate(case, row)
            rows.append(_row(case, row, simulated[schedule]))
    fastest = min(row["simulated_seconds"] for row in rows)
    return {
        **about,
        "lost_by_first": round(rows[0]["simulated_seconds"] / fastest - 1, 4),
        "rows": len(rows),
        "estimates": sum(row["estimate"] for row in rows),
        "worst_error": _worst_error(rows, estimates=False),
        "worst_error_of_estimates": _worst_error(rows, estimates=True),
    }


def _worst_error(rows: Sequence[dict[str, Any]], *, estimates: bool) -> float:
    return max((abs(row["error"]) for row in rows if row["estimate"] is estimates), default=0.0)


def _row(case: Case, row: Ranked, rate: float) -> dict[str, Any]:
    """A row's seconds for a token of the batch, or for the answer to one request, shown and simulated."""
    work = 1 if case.objective == "throughput" else _workload(case.objective).new_tokens[0]
    assert row.throughput_tokens_per_second is not None
    shown, simulated = work / row.throughput_tokens_per_second, work / rate
    return {
        "policy": row.policy,
        "estimate": row.estimate,
        "shown_seconds": float(f"{shown:.5g}"),
        "simulated_seconds": float(f"{simulated:.5g}"),
        "error": round(shown / simulated - 1, 4),
    }


def _simulated_rate(case: Case, row: Ranked) -> float:
    """Tokens per second of the row's sizes."""
    shares = {KV_SHARE: row.kv_on_gpu} if row.kv_on_gpu is not None else {}
    return simulate_model(
        _model(case),
        machine=_machine(case.machine),
        policy=find("policies", row.policy),
        workload=_workload(case.objective),
        format=_format(case),
        batch_size=row.batch_size,
        micro_batch_size=row.micro_batch_size,
        prefill_chunk=row.prefill_chunk,
        settings=shares,
        band=False,
    ).throughput_tokens_per_second


@cache
def _workload(objective: Objective) -> Workload:
    """The workload that `plan` plans for."""
    workload = load_workload(WORKLOAD)
    if objective == "throughput":
        return workload
    lengths = requests_for(objective, workload.lengths(MOST_REQUESTS))
    return Workload(name="one request", new_tokens=workload.new_tokens, prompt_tokens=lengths)


@cache
def _machine(name: str) -> Machine:
    return build_machine(BUILT[name]).machine if name in BUILT else machine_named(name)


def _model(case: Case) -> str:
    return case.model.split(" ")[0]


def _format(case: Case) -> str | None:
    return case.model.partition(" ")[2] or None


if __name__ == "__main__":
    main()
