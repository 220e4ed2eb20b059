"""Cuts prompts into parts over several steps (chunked prefill), so that running requests wait for one part only.

Memory is reserved for the parts, and not for the longest prompt.
"""

from __future__ import annotations

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.serving.capacity import Capacity
from moesched.steps.plan import Plan

CHUNK = 1024
"""Default number of prompt tokens of a step, if all weights stay in memory."""


def with_cut_prompts(capacity: Capacity, asked: int | None) -> Capacity:
    """Return the capacity of a server that cuts prompts into parts, one part per step.

    Args:
        capacity: the capacity with whole prompts.
        asked: the largest number of prompt tokens of a step, over all requests; None for the default, `CHUNK`.
    """
    each = -(-(asked or CHUNK) // capacity.places)
    return replace(capacity, chunk=min(each, capacity.prompt_tokens))


def cuts_prompts(plan: Plan, asked: int | None) -> bool:
    """Decide whether to run a plan that cuts prompts into parts, one per step, instead of one with whole prompts.

    A part of a prompt attends to the parts before it, so the whole KV cache has to be on the accelerator. Streamed
    weights are streamed again for each part, so a plan with such weights is run only if the user asks for it.

    Args:
        plan: a plan with cut prompts.
        asked: the largest number of prompt tokens of a step, as the user gave it; None if the user gave none.

    Raises:
        BadInput: the user asks for cut prompts, and the plan does not allow them.
    """
    allowed = may_cut_prompts(plan)
    if asked is not None and not allowed:
        raise BadInput(
            f"--prefill-chunk {asked} cuts prompts over steps, and the plan has the KV cache on the host, or several "
            "machines: omit it"
        )
    return allowed and (asked is not None or not plan.weights.pools)


def may_cut_prompts(plan: Plan) -> bool:
    """Test whether a plan is for one machine and has its whole KV cache on the accelerator."""
    return plan.nodes.count == 1 and all(role == "accelerator" for roles in plan.kv.roles for role in roles)
