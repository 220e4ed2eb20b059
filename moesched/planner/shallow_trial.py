"""Simulates a few layers of a model, with memory budgets cut in proportion; seconds are extrapolated to all layers.

The tasks of all layers are much alike. Bytes that do not depend on the number of layers, such as activations and the
buffer that weights stream through, are not cut.
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
"""Largest difference from the whole model's share of resident weights, or of the KV cache, on the accelerator."""
POOL_DIFFERS = 1.5
"""Largest factor by which a pool may exceed its size in proportion to the number of layers."""


class Cut(NamedTuple):
    """A model cut to a few layers, with memory budgets such that its plan is like the whole model's plan.

    Attributes:
        setting: the setting of the cut model.
        budgets: bytes by memory.
        batch: the batch, the same as for the whole model.
        part: the cut model's number of layers divided by the whole model's.
        share: share of the KV cache on the accelerator; None for a policy that does not split it.
    """

    setting: Setting
    budgets: dict[str, int]
    batch: Batch
    part: float
    share: float | None

    def trial(self, most_steps: int, prepared: tuple[Plan, Policy] | None = None) -> TrialFigures:
        """Simulate the few layers, and extrapolate the figures to all layers.

        Args:
            most_steps: the largest number of steps to simulate, the prefill included.
            prepared: plan and policy of the few layers, if they were planned already; a plan can run only once.
        """
        plan, policy = prepared or self.plan()
        return trial_run(plan, policy, self.setting.cost_of(plan), most_steps=most_steps).scaled(
            1 / self.part
        )

    def plan(self) -> tuple[Plan, Policy]:
        """Return a new plan of the few layers, and its policy."""
        return self.setting.plan(self.batch, self.budgets, self.share)

    def on(self, setting: Setting) -> Cut:
        """Return the same cut model in another setting, such as a faster machine.

        The cut model's budget of each memory changes by `part` times the difference between the settings' budgets.
        """
        more = {
            name: self.part * (setting.capacity(name) - self.setting.capacity(name)) for name in self.budgets
        }
        return self._replace(
            setting=replace(setting, layout=self.setting.layout),
            budgets={name: nbytes + round(more[name]) for name, nbytes in self.budgets.items()},
        )


def cut_like(setting: Setting, plan: Plan, share: float | None) -> tuple[Cut, tuple[Plan, Policy]] | None:
    """Cut the model to the fewest layers that allow a plan like `plan`.

    The two plans have about equal shares of the weights, and of the KV cache, on the accelerator.

    Args:
        setting: the setting of the whole model.
        plan: the plan of the whole model.
        share: share of the KV cache on the accelerator; None for a policy that does not split it.

    Returns:
        The cut model with its plan and policy; None if no cut model's plan is like the whole model's.
    """
    for depth in depths_of(setting):
        found = _alike(cut(setting, depth), plan, share)
        if found is not None and _as_resident(found[1][0], plan):
            return found
    return None


def _alike(setting: Setting, plan: Plan, share: float | None) -> tuple[Cut, tuple[Plan, Policy]] | None:
    """Plan a cut model with memory budgets in proportion to its number of layers; None if no plan is accepted.

    A pool that caches pages has slots in proportion to the number of layers. A pool through which pages stream has a
    fixed number of slots. So two plans are tried: one with budgets as if all pools were caches, then one with budgets
    as if pages streamed through all pools. A plan is refused if it does not fit, or has no free slots in a memory where
    the whole model's plan has some. The plan for caches is also refused if its pools are too large for the number of
    layers.

    Args:
        setting: the setting of the cut model.
        plan: the plan of the whole model.
        share: share of the KV cache on the accelerator; None for a policy that does not split it.
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
    """Return the budget of each memory of a cut model, in bytes.

    Args:
        setting: the setting of the cut model.
        plan: the plan of the whole model.
        part: the cut model's number of layers divided by the whole model's.
        fixed: bytes by memory of pools whose size does not depend on the number of layers.
    """
    deep = bytes_beside_pages(plan, plan)
    flat = bytes_beside_pages(setting.undecided(plan.batch), plan)
    return {
        name: round(flat[name] + part * (memory.capacity - deep[name]) + (1 - part) * fixed[name])
        for name, memory in plan.memories.items()
    }


def _pooled(plan: Plan) -> dict[str, int]:
    """Return the bytes, by memory, of the pools' slots in which no page is loaded before the first step."""
    found = {name: -filled_bytes(plan, name) for name in plan.memories}
    for pool in plan.weights.pools:
        found[pool.memory.name] += pool.nbytes
    return found


def _as_resident(few: Plan, plan: Plan) -> bool:
    """Test whether two plans keep about equal shares of the weights, and of the KV cache, on the accelerator."""
    pairs = (_kept(few), _kept(plan)), (few.kv.on_gpu, plan.kv.on_gpu)
    return all(abs(ours - theirs) <= SHARE_DIFFERS for ours, theirs in pairs)


def _kept(plan: Plan) -> float:
    """Return the share of the weights that is on the accelerator before the first step, from 0 to 1."""
    return resident_bytes(plan) / weight_bytes(plan)
