"""Fig. 9 of MoE-Lightning: for one layer, times of attention on the CPU, of KV cache copies, and of experts."""

from __future__ import annotations

from moesched.inputs.lookup import find_shape
from moesched.machines.cost import cost_model
from moesched.machines.sustained import at_peak
from moesched.models.layout import weight_layout
from moesched.models.operations import Operations
from moesched.reproduce.moe_lightning.paper import Paper
from moesched.reproduce.moe_lightning.rate_factors import RateFactors, machine_at
from moesched.reproduce.report import Section, rounded
from moesched.work import Work

MICRO_BATCHES = (32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048)
"""Micro-batch sizes and tokens of context: the paper gives the ranges, the values between are ours."""
NEARLY_SAME = 1.25


def attention_section(paper: Paper, factors: RateFactors) -> Section:
    """Make the section of Fig. 9: the times of one layer for several micro-batch sizes and context lengths."""
    where = paper.settings["S2"]
    layout = weight_layout(find_shape(where.model))
    machine = machine_at(where.described(), factors)
    cost, operations = cost_model(machine, layout.dtype), Operations(layout.config, layout.dtype)
    full = cost_model(at_peak(where.described()), layout.dtype)
    link = f"{machine.host.memory}->{machine.accelerator.memory}"
    rows: list[dict[str, float]] = []
    for size in MICRO_BATCHES:
        amount = operations.experts(size)
        work = Work("experts", machine.roles.accelerator, amount.flops, amount.nbytes)
        experts, fastest = cost.work(work).seconds, full.work(work).seconds
        for context in CONTEXTS:
            amount = operations.attention_step([context] * size)
            at_host = Work("cpu_attention", machine.roles.host, amount.flops, amount.nbytes)
            attention = cost.work(at_host).seconds
            cache = size * context * operations.kv_bytes
            moving = cost.work(Work(link, link, nbytes=cache)).seconds
            rows.append(
                {
                    "micro_batch_size": size,
                    "context": context,
                    "cpu_attention_ms": rounded(attention * 1e3),
                    "moving_kv_ms": rounded(moving * 1e3),
                    "experts_ms": rounded(experts * 1e3),
                    "experts_at_full_rate_ms": rounded(fastest * 1e3),
                    "ratio": rounded(moving / attention),
                }
            )
    growth = max(row["experts_ms"] for row in rows) / min(row["experts_ms"] for row in rows)
    share = rows[-1]["cpu_attention_ms"] / rows[-1]["experts_ms"]
    ranges = {"first": MICRO_BATCHES[0], "last": MICRO_BATCHES[-1], "context": CONTEXTS[-1]}
    claims = [
        paper.claims["cpu_attention"].ratio([row["ratio"] for row in rows]),
        paper.claims["experts_hardly_change"].beside(
            f"grows by {growth - 1:.1%}", growth < NEARLY_SAME, **ranges
        ),
        paper.claims["attention_is_the_bottleneck"].beside(
            f"{share:.2f}x the experts' time", share > 1, **ranges
        ),
    ]
    return paper.section("cpu-attention", rows, claims)
