"""Trial runs of a few layers, in memories that are cut like the model; seconds are extrapolated to its depth.

A layer's tasks are much the same in all layers. What a plan takes of a memory whatever the depth, such as activations
and the buffer that weights stream through, is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.planner.few_layers import cut, depths_of
from moesched.planner.setting import Setting
from moesched.planner.traits import bytes_beside_pages, filled_bytes, resident_bytes, weight_bytes
from moesched.planner.trial_run import TrialFigures, trial_run
from moesched.requests.batch import Batch
from moesched.seams import Policy
from moesched.steps.plan import Plan

SHARE_DIFFERS = 0.05
"""Most that the share of resident weights, or of the KV cache, may differ from that of the whole model."""
POOL_DIFFERS = 1.5
"""Factor by which a pool may be larger than in proportion to the layers."""


class Cut(NamedTuple):
    """A model of a few layers, in memories in which its plan is like that of the whole model.

    Attributes:
        part: share of the layers that are left.
        share: share of the KV cache on the accelerator; None for a policy that does not split it.
    """

    setting: Setting
    budgets: dict[str, int]
    batch: Batch
    part: float
    share: float | None

    def trial(self, most_steps: int, prepared: tuple[Plan, Policy] | None = None) -> TrialFigures:
        """Simulate the few layers, by `prepared` if it was planned already; figures are extrapolated to all layers."""
        plan, policy = prepared or self.plan()
        return trial_run(plan, policy, self.setting.cost_of(plan), most_steps=most_steps).scaled(
            1 / self.part
        )

    def plan(self) -> tuple[Plan, Policy]:
        """Plan the few layers."""
        return self.setting.plan(self.batch, self.budgets, self.share)

    def on(self, setting: Setting) -> Cut:
        """The same few layers in another setting, whose memories' differences are scaled to the share of the layers."""
        more = {
            name: self.part * (setting.capacity(name) - self.setting.capacity(name)) for name in self.budgets
        }
        return self._replace(
            setting=replace(setting, layout=self.setting.layout),
            budgets={name: nbytes + round(more[name]) for name, nbytes in self.budgets.items()},
        )


def cut_like(setting: Setting, plan: Plan, share: float | None) -> tuple[Cut, tuple[Plan, Policy]] | None:
    """Cut the model to the fewest layers whose plan keeps the same share of weights; returns that plan and policy, too.

    Args:
        plan: of the whole model.
        share: share of the KV cache on the accelerator; None for a policy that does not split it.
    """
    for depth in depths_of(setting):
        found = _alike(cut(setting, depth), plan, share)
        if found is not None and _as_resident(found[1][0], plan):
            return found
    return None


def _alike(setting: Setting, plan: Plan, share: float | None) -> tuple[Cut, tuple[Plan, Policy]] | None:
    """Plan a cut model in memories that leave it the same room in proportion; None if it does not fit.

    A cache has slots in proportion to the layers; a buffer that pages stream through has the same number at any depth.
    A plan whose pools do not shrink with the memory is taken to stream.
    """
    part = setting.layout.config.layers / len(plan.layers)
    pooled = _pooled(plan)
    for fixed in (dict.fromkeys(pooled, 0), pooled):
        few = Cut(setting, _budgets(setting, plan, part, fixed), plan.batch, part, share)
        try:
            prepared = few.plan()
        except BadInput:
            continue
        slots = _pooled(prepared[0])
        if any(pooled[name] > 0 >= slots[name] for name in slots):
            continue  # a policy without room for its pool has another schedule
        if fixed is pooled or all(slots[name] <= POOL_DIFFERS * part * pooled[name] for name in slots):
            return few, prepared
    return None


def _budgets(setting: Setting, plan: Plan, part: float, fixed: Mapping[str, int]) -> dict[str, int]:
    """Budgets of a cut model's memories, in bytes.

    fixed: bytes of pools by memory that do not depend on the depth.
    """
    deep = bytes_beside_pages(plan, plan)
    flat = bytes_beside_pages(setting.undecided(plan.batch), plan)
    return {
        name: round(flat[name] + part * (memory.capacity - deep[name]) + (1 - part) * fixed[name])
        for name, memory in plan.memories.items()
    }


def _pooled(plan: Plan) -> dict[str, int]:
    """Bytes by memory of the pools' slots that are empty before the first step."""
    found = {name: -filled_bytes(plan, name) for name in plan.memories}
    for pool in plan.weights.pools:
        found[pool.memory.name] += pool.nbytes
    return found


def _as_resident(few: Plan, plan: Plan) -> bool:
    """Test whether a plan of few layers keeps about the same shares of weights and KV cache on the accelerator."""
    pairs = (_kept(few), _kept(plan)), (few.kv.on_gpu, plan.kv.on_gpu)
    return all(abs(ours - theirs) <= SHARE_DIFFERS for ours, theirs in pairs)


def _kept(plan: Plan) -> float:
    """The share of the weights that is on the accelerator before the first step, from 0 to 1."""
    return resident_bytes(plan) / weight_bytes(plan)
