"""Long prompts that are cut over steps, so that those who are being answered wait for a part of one only.

Memory is reserved for the parts, and not for the longest prompt.
"""

from __future__ import annotations

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.serving.capacity import Capacity
from moesched.steps.plan import Plan

CHUNK = 1024
"""Prompt tokens between two steps of tokens by default, where all weights stay in memory."""


def with_cut_prompts(capacity: Capacity, asked: int | None) -> Capacity:
    """The capacity with prompts that are cut over steps.

    asked: the most prompt tokens of a step; None for the default.
    """
    each = -(-(asked or CHUNK) // capacity.places)
    return replace(capacity, chunk=min(each, capacity.prompt_tokens))


def cuts_prompts(plan: Plan, asked: int | None) -> bool:
    """Test whether a plan of cut prompts is to run.

    A part of a prompt attends to the parts before it: the KV cache has to be where prompts attend. Where weights are
    streamed, each part takes as long as to stream them, so that prompts are cut only if that is asked for.

    Args:
        asked: the most prompt tokens of a step; None for the default.

    Raises:
        BadInput: it is asked for, and the plan does not allow it.
    """
    allowed = may_cut_prompts(plan)
    if asked is not None and not allowed:
        raise BadInput(
            f"--prefill-chunk {asked} cuts prompts over steps, and the plan has the KV cache on the host, or several "
            "machines: omit it"
        )
    return allowed and (asked is not None or not plan.weights.pools)


def may_cut_prompts(plan: Plan) -> bool:
    """Test whether prompts attend where the whole KV cache is, on one machine."""
    return plan.nodes.count == 1 and all(role == "accelerator" for roles in plan.kv.roles for role in roles)
