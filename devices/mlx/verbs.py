"""The table of verbs: the implementation of each one, by the nodes of a batch."""

from __future__ import annotations

from typing import NamedTuple

from ..shared.node_exchanges import NodeVerbs
from ..shared.verbs import Verb, after
from .attention import MlxAttention
from .moe_layer import MlxMoELayer
from .next_tokens import MlxNextTokens
from .weights import MlxWeights

DEFERRABLE = {
    "embed",
    "pre_attention",
    "attention",
    "cpu_attention",
    "run_expert",
    "warm_expert",
    "combine",
}
"""Verbs whose results the host does not need: they add to a micro-batch's state."""


class Parts(NamedTuple):
    """The parts of a batch that run verbs.

    Attributes:
        attention, tokens: None on a node that does not attend.
        node: None unless nodes share the experts.
    """

    weights: MlxWeights
    attention: MlxAttention | None
    moe: MlxMoELayer
    tokens: MlxNextTokens | None
    node: NodeVerbs | None


def verbs_of(parts: Parts) -> dict[str, Verb]:
    """The implementation of every verb of a batch."""
    weights, attention, moe, tokens, node = parts
    verbs: dict[str, Verb] = {
        "load": weights.load,
        "fetch": weights.fetch,
        "copy_to_pinned": weights.fetch,
        "preview_route": moe.preview_route,
        "run_expert": moe.run_expert,
        "warm_expert": moe.warm_expert,
        "combine": moe.combine,
    }
    if attention:
        verbs |= {
            "embed": attention.embed,
            "pre_attention": attention.pre_attention,
            "attention": attention.attention,
            "cpu_attention": attention.attention,
            "post_attention": after(attention.project_output, moe.run_all),
            "route": after(attention.project_output, moe.choose_experts),
        }
    if tokens:
        verbs["sample"] = tokens.sample
    if node:
        verbs |= node.verbs  # sums and exchanges over nodes instead of `combine`, `route` and `sample` here
    return verbs
