"""Trial runs of a few layers, in memories that are cut like the model; seconds are extrapolated to its depth.

A layer's tasks are much the same in all layers. What a plan takes of a memory whatever the depth, such as activations
and the buffer that weights stream through, is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesched.errors import BadInput
from moesched.planner.few_layers import cut, depths_of
from moesched.planner.setting import Setting
from moesched.planner.traits import bytes_beside_pages, filled_bytes, resident_bytes, weight_bytes
from moesched.planner.trial_run import TrialRun, trial_run
from moesched.seams import Policy
from moesched.steps.plan import Plan

SHARE_DIFFERS = 0.04
"""Most that the share of resident weights may differ from that of the whole model."""
POOL_DIFFERS = 1.5
"""Factor by which a pool may be larger than in proportion to the layers."""


def shallow_trial(
    setting: Setting, plan: Plan, policy: Policy, share: float | None, most_steps: int
) -> TrialRun:
    """The figures of a plan, from the fewest layers whose plan keeps as many weights in proportion.

    Args:
        plan: for all layers; it is run itself where no shallower one is like it.
        share: of the KV cache on the accelerator, for a policy that splits it.
        most_steps: most steps to run, the prefill included.
    """
    for depth in depths_of(setting):
        found = _alike(cut(setting, depth), plan, share)
        if found is not None and abs(_kept(found[0]) - _kept(plan)) <= SHARE_DIFFERS:
            return trial_run(*found, setting.cost, most_steps=most_steps).times(len(plan.layers) / depth)
    return trial_run(plan, policy, setting.cost, most_steps=most_steps)


def _alike(setting: Setting, plan: Plan, share: float | None) -> tuple[Plan, Policy] | None:
    """The plan of a cut model in memories that leave it as much room in proportion; None where it does not fit.

    A cache has slots in proportion to the layers; a buffer that pages stream through has as many at any depth. A plan
    whose pools do not shrink with the memory streams.
    """
    part = setting.layout.config.layers / len(plan.layers)
    pooled = _pooled(plan)
    found = _fitting(setting, plan, share, part, dict.fromkeys(pooled, 0))
    if found is not None and all(
        nbytes <= POOL_DIFFERS * part * pooled[memory] for memory, nbytes in _pooled(found[0]).items()
    ):
        return found
    return _fitting(setting, plan, share, part, pooled)


def _fitting(
    setting: Setting, plan: Plan, share: float | None, part: float, fixed: Mapping[str, int]
) -> tuple[Plan, Policy] | None:
    """The cut model's plan of the same batch.

    Args:
        part: share of the layers that are left.
        fixed: bytes of pools by memory that do not depend on the depth.
    """
    deep = bytes_beside_pages(plan, plan)
    flat = bytes_beside_pages(setting.undecided(plan.batch), plan)
    budgets = {
        name: round(flat[name] + part * (memory.capacity - deep[name]) + (1 - part) * fixed[name])
        for name, memory in plan.memories.items()
    }
    try:
        return setting.plan(plan.batch, budgets, share)
    except BadInput:
        return None


def _pooled(plan: Plan) -> dict[str, int]:
    """Bytes by memory of slots that are empty before the first step."""
    found = {name: -filled_bytes(plan, name) for name in plan.memories}
    for pool in plan.weights.pools:
        found[pool.memory.name] += pool.nbytes
    return found


def _kept(plan: Plan) -> float:
    """The share of the weights that is on the accelerator before the first step."""
    return resident_bytes(plan) / weight_bytes(plan)
