"""Fixed decode steps: one accelerator computes everything, and no weights or KV caches move to or from its memory."""

from __future__ import annotations

from moesched.steps.plan import Plan


def has_fixed_steps(plan: Plan) -> bool:
    """Test whether weights and KV cache all stay in the memory of the plan's one accelerator, which computes alone."""
    if len(plan.accelerators) > 1 or plan.nodes.count > 1 or plan.layout.config.ranks > 1:
        return False
    (fast,) = plan.accelerators
    kept = {page.id for fixed in plan.weights.resident if fixed.memory is fast for page in fixed.pages()}
    cached = {role for roles in plan.kv.roles for role in roles}
    return cached == {"accelerator"} and len(kept) == len(plan.layout.pages)
