"""What twice as many accelerators bring: plans for Mixtral 8x22B and DBRX on two and on four T4, all simulated.

    python benchmarks/tensor_parallel.py

MoE-Lightning (section 5.3) states 2.77 to 3.38 times the throughput from two to four T4 for Mixtral 8x22B with padded
prompts (settings S6 and S7), and 2.1 to 2.8 times for DBRX without padding (S8 and S9), both on MTBench. Here the
planner chooses the sizes of CGOPipe for each. Writes results/tensor_parallel.json; nothing in it was measured.
"""

from __future__ import annotations

from typing import Any

from _results import write_result
from rich.progress import track

from moesched import given_lengths, load_workload, plan_model
from moesched.planner import Proposal

CASES = [("mixtral-8x22b", True, (2.77, 3.38)), ("dbrx", False, (2.1, 2.8))]
"""Model, whether prompts are padded to the longest, what the paper states."""
MACHINES = ("t4x2", "t4x4")
POLICY = "cgopipe"


def main() -> None:
    """Plan every case and write the ratios."""
    gens = load_workload("mtbench").new_tokens
    runs = [(*case, gen) for case in CASES for gen in gens]
    rows = [row(*each) for each in track(runs, description="planning")]
    print(write_result("tensor_parallel", {"policy": POLICY, "workload": "mtbench", "rows": rows}))


def row(model: str, padded: bool, stated: tuple[float, float], gen: int) -> dict[str, Any]:
    """One model and generation length on both machines."""
    workload = load_workload("mtbench")
    if padded:
        workload = given_lengths([workload.longest], gen)
    plans = [plan_model(model, machine=name, workload=workload, gen=gen, policy=POLICY) for name in MACHINES]
    few, many = (each.predicted.throughput_tokens_per_second for each in plans)
    return {
        "model": model,
        "padded": padded,
        "new_tokens": gen,
        "machines": [sizes(each) for each in plans],
        "ratio": round(many / few, 3),
        "stated_by_the_paper": stated,
    }


def sizes(proposal: Proposal) -> dict[str, Any]:
    """What was planned for one machine, and what it reaches."""
    plan, predicted = proposal.plan, proposal.predicted
    return {
        "machine": proposal.machine,
        "tensor_parallel": proposal.tensor_parallel,
        "batch_size": plan.batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "weights_on_gpu": round(plan.weights_on_gpu, 4),
        "tokens_per_second": round(predicted.throughput_tokens_per_second, 2),
        "bound_by": predicted.bound_by,
        "interconnect_busy": round(predicted.utilization["interconnect"], 4),
    }


if __name__ == "__main__":
    main()
