"""Section 5.3 of MoE-Lightning: speedups from two GPUs to four, for MoE-Lightning (tensor parallel) and FlexGen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesched.planner.proposal import plan_model
from moesched.reproduce.moe_lightning.paper import Paper
from moesched.reproduce.moe_lightning.rate_factors import RateFactors, machine_at
from moesched.reproduce.moe_lightning.speedups import (
    GENERATIONS,
    PLANNER,
    WORKLOAD,
    Rows,
    generation_claims,
    rate_of,
)
from moesched.reproduce.moe_lightning.systems import SYSTEMS
from moesched.reproduce.report import Section, rounded
from moesched.requests.workloads import given_lengths, load_workload

COMPARED = (
    ("MoE-Lightning(p)", ("S6", "S7")),
    ("FlexGen", ("S6", "S7")),
    ("MoE-Lightning", ("S8", "S9")),
)
"""Pairs of a system and its two settings: one with two T4 GPUs, one with four."""
POLICIES = {"MoE-Lightning(p)": "cgopipe", "FlexGen": "flexgen_pipeline", "MoE-Lightning": "cgopipe"}


def scaling(paper: Paper, factors: RateFactors, on_progress: Callable[[str], None]) -> Section:
    """Make the section of throughput on two and on four GPUs."""
    rows: Rows = []
    for system, settings in COMPARED:
        for setting in settings:
            for new_tokens in GENERATIONS:
                on_progress(f"5.3: {system}, {new_tokens} tokens on {setting}")
                where = paper.settings[setting]
                workload = load_workload(WORKLOAD)
                if SYSTEMS[system].padded:
                    workload = given_lengths([workload.longest], new_tokens)
                proposal = plan_model(
                    where.model,
                    machine=machine_at(where.described(), factors),
                    workload=workload,
                    gen=new_tokens,
                    policy=POLICIES[system],
                )
                predicted = proposal.predicted
                rows.append(
                    {
                        "setting": setting,
                        "new_tokens": new_tokens,
                        "system": system,
                        "sizes_by": PLANNER,
                        "batch_size": proposal.plan.batch_size,
                        "micro_batch_size": proposal.plan.micro_batch_size,
                        "tokens_per_second": rounded(predicted.throughput_tokens_per_second),
                        "bound_by": predicted.bound_by,
                        "busy": round(predicted.utilization[predicted.bound_by], 3),
                    }
                )
    claims = [
        paper.claims[claim].ratio(_growth(rows, *compared))
        for claim, compared in zip(
            ("scaling_mixtral", "scaling_flexgen", "scaling_dbrx"), COMPARED, strict=True
        )
    ]
    return paper.section("scaling", rows, [*claims, *generation_claims(paper, rows, "S6", PLANNER)])


def _growth(rows: Rows, system: str, settings: Sequence[str]) -> list[float]:
    """Return a system's throughput in the second setting over that in the first, for each generation length.

    Args:
        rows: rows of the section.
        settings: names of two settings, the one with fewer GPUs first.
    """
    few, many = settings
    return [
        rate_of(rows, many, new_tokens, system, PLANNER) / rate_of(rows, few, new_tokens, system, PLANNER)
        for new_tokens in GENERATIONS
    ]
