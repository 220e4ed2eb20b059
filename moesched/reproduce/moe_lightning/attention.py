"""Fig. 9 of MoE-Lightning: attention on the CPU, moving the KV cache instead, and the experts, for one layer."""

from __future__ import annotations

from moesched.inputs.lookup import find_shape
from moesched.machines.cost import cost_model
from moesched.machines.sustained import at_peak
from moesched.models.layout import weight_layout
from moesched.models.operations import Operations
from moesched.reproduce.moe_lightning.paper import Paper
from moesched.reproduce.moe_lightning.rates import Rates, machine_at
from moesched.reproduce.report import Claim, Section, Value, ratio_claim, rounded
from moesched.tasks import Work

MICRO_BATCHES = (32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048)
"""The paper's ranges; the values between are ours."""
NEARLY_SAME = 1.25

HOW = (
    "One layer of a decode step of Mixtral 8x7B on the L4 machine. CPU attention runs at the profile's full "
    "rates, since the paper's kernel was not fitted; link and GPU run at the fitted rates."
)


def attention_section(paper: Paper, rates: Rates) -> Section:
    """Times of one layer by micro-batch and context."""
    where = paper.settings["S2"]
    layout = weight_layout(find_shape(where.model))
    machine = machine_at(where.described(), rates)
    cost, operations = cost_model(machine, layout.dtype), Operations(layout.config, layout.dtype)
    full = cost_model(at_peak(where.described()), layout.dtype)
    link = f"{machine.host.memory}->{machine.accelerator.memory}"
    rows: list[dict[str, Value]] = []
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
    return Section(
        name="cpu-attention",
        title="Fig. 9: CPU attention, moving the KV cache, and the experts",
        how=HOW,
        rows=rows,
        claims=[
            ratio_claim(paper.claims["cpu_attention"], [float(row["ratio"] or 0) for row in rows]),
            *_claims(rows),
        ],
    )


def _claims(rows: list[dict[str, Value]]) -> list[Claim]:
    experts = [float(row["experts_ms"] or 0) for row in rows]
    growth = max(experts) / min(experts)
    longest = rows[-1]
    share = float(longest["cpu_attention_ms"] or 0) / float(longest["experts_ms"] or 1)
    return [
        Claim(
            where="6.2",
            what=f"the experts' time from µ = {MICRO_BATCHES[0]} to {MICRO_BATCHES[-1]}",
            paper="hardly changes",
            ours=f"grows by {growth - 1:.1%}",
            agrees=growth < NEARLY_SAME,
        ),
        Claim(
            where="6.2",
            what=f"CPU attention is the bottleneck at µ = {MICRO_BATCHES[-1]}, context {CONTEXTS[-1]}",
            paper="yes",
            ours=f"{share:.2f}x the experts' time",
            agrees=share > 1,
        ),
    ]
