"""The systems of MoE-Lightning's paper, each run by one of our policies, and predictions of their throughput."""

from __future__ import annotations

from functools import partial

import msgspec

from moesched import plugins
from moesched.errors import BadInput
from moesched.inputs.lookup import find_shape
from moesched.machines.cost import cost_model
from moesched.models.layout import weight_layout
from moesched.planner.setting import Setting
from moesched.planner.traits import resident_bytes
from moesched.planner.trial_run import trial_run
from moesched.reproduce.moe_lightning.paper import PaperSetting
from moesched.reproduce.moe_lightning.rate_factors import (
    RateFactors,
    copying_caches,
    machine_at,
    multiplying_in_half,
)
from moesched.requests.workloads import load_workload
from moesched.seams import Policy
from moesched.steps.plan import Plan

ROOM = 1.05
MOST_REQUESTS = 4096


class System(msgspec.Struct, frozen=True):
    """The way in which we simulate one system of the paper.

    Attributes:
        policy: name of our policy with the system's schedule.
        padded: whether every prompt is padded to the length of the workload's longest.
        attends_as_flexgen: whether attention is on the CPU, with FlexGen's kernel.
        attends_in_half: whether attention is on the CPU, with products of 16-bit numbers.
    """

    policy: str
    padded: bool = True
    attends_as_flexgen: bool = False
    attends_in_half: bool = False


SYSTEMS = {
    "FlexGen(c)": System("flexgen_cpu", attends_as_flexgen=True),
    "FlexGen": System("flexgen_synchronous"),
    "DeepSpeed": System("layer_streaming"),
    "MoE-Lightning(p)": System("cgopipe", attends_in_half=True),
    "MoE-Lightning": System("cgopipe", padded=False, attends_in_half=True),
}
AS_DRAWN = System("flexgen")
"""FlexGen as Fig. 6 draws it: the next micro-batch's keys and values are loaded while one computes."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted throughput of a system for one batch size, and the figures behind it.

    Attributes:
        batch_size: number of requests.
        prefill_seconds: seconds of the prefill.
        step_seconds: seconds of a decode step in the middle of the generation.
        bound_by, busy: the busiest lane in such a step, and the share of the step for which it is busy.
        weights_on_gpu: share of the weights' bytes that stay on the accelerator.
        gpu_budget: factor by which the accelerator's memory was enlarged to fit the paper's sizes.
        host_bytes: bytes used of the host's memory.
    """

    tokens_per_second: float
    batch_size: int
    micro_batch_size: int
    prefill_seconds: float
    step_seconds: float
    bound_by: str
    busy: float
    weights_on_gpu: float
    gpu_budget: float
    host_bytes: int


def setting_of(
    system: System,
    where: PaperSetting,
    workload: str,
    new_tokens: int,
    factors: RateFactors | None,
    *,
    requests: int = MOST_REQUESTS,
) -> Setting:
    """Return the machine, model, policy and requests for a system of the paper, in the form that the planner takes.

    Args:
        where: the paper's model and machine.
        workload: name of the workload that gives the prompts' lengths.
        new_tokens: number of tokens to generate for each request.
        factors: shares of the rates that the machine's profile states; None for the profile's sustained rates.
        requests: number of requests of the workload.
    """
    machine = where.described()
    layout = weight_layout(find_shape(where.model))
    if factors is not None:
        described = machine_at(machine, factors, attends_as_flexgen=system.attends_as_flexgen)
    elif system.attends_as_flexgen:
        described = copying_caches(machine)
    elif system.attends_in_half and not where.wide_vectors:
        described = multiplying_in_half(machine)
    else:
        described = machine
    chosen = load_workload(workload)
    lengths = [chosen.longest] * requests if system.padded else chosen.lengths(requests)
    return Setting(
        make=partial(plugins.make_policy, system.policy, {}),
        machine=described,
        layout=layout,
        lengths=tuple(lengths),
        new_tokens=new_tokens,
        cost=cost_model(described, layout.dtype),
        budgets={},
    )


def predict(setting: Setting, micro_batches: int, micro_batch_size: int) -> Predicted:
    """Predict the throughput from the prefill and a few decode steps in the middle of the generation.

    If the plan does not fit in the accelerator's memory, this memory is enlarged in steps of 5 %, since the measured
    systems did run with these micro-batches.

    Args:
        micro_batches: number of micro-batches.
        micro_batch_size: number of requests in each micro-batch.

    Raises:
        BadInput: the host's memory is too small.
    """
    batch = setting.batch(micro_batches, micro_batch_size)
    plan, policy, larger = fitting(setting, micro_batches, micro_batch_size)
    total = sum(map(plan.slot_bytes, plan.layout.pages))
    weights = resident_bytes(plan) / total
    host = plan.memory("host").used
    seen = trial_run(plan, policy, setting.cost)
    bound_by = max(seen.utilization, key=seen.utilization.__getitem__)
    return Predicted(
        tokens_per_second=seen.tokens_per_second(batch),
        batch_size=len(batch.prompts),
        micro_batch_size=micro_batch_size,
        prefill_seconds=seen.prefill_seconds,
        step_seconds=seen.step_seconds,
        bound_by=bound_by,
        busy=seen.utilization[bound_by],
        weights_on_gpu=weights,
        gpu_budget=larger,
        host_bytes=host,
    )


def fitting(setting: Setting, micro_batches: int, micro_batch_size: int) -> tuple[Plan, Policy, float]:
    """Plan a batch of these sizes, with the accelerator's memory enlarged until the plan fits.

    Returns:
        The plan, the policy, and the factor by which the accelerator's memory was enlarged, at least 1.
    """
    batch = setting.batch(micro_batches, micro_batch_size)
    gpu = setting.machine.accelerator.memory
    capacity = setting.capacity(gpu)
    larger = 1.0
    while True:
        try:
            plan, policy = setting.plan(batch, {**setting.budgets, gpu: round(capacity * larger)})
        except BadInput as error:
            if f"bytes of {gpu}" not in str(error):
                raise
            larger *= ROOM
        else:
            return plan, policy, larger
