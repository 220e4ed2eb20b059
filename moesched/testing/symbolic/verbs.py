"""The table of verbs: the implementation of each one, by the nodes of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesched.steps.plan import Plan
from moesched.testing.symbolic.attention import Attention
from moesched.testing.symbolic.batch import SymbolicBatch
from moesched.testing.symbolic.data import Access
from moesched.testing.symbolic.exchanges import Board, Exchanges
from moesched.testing.symbolic.experts import Experts
from moesched.testing.symbolic.weights import fetch, load

Verb = Callable[[Any, Access], Any]


def verbs_of(plan: Plan, batch: SymbolicBatch, board: Board) -> dict[str, Verb]:
    """The function of every verb of a batch, by the verb's name."""
    attention, experts = Attention(batch), Experts(batch)
    verbs: dict[str, Verb] = {
        "load": load,
        "fetch": fetch,
        "copy_to_pinned": fetch,
        "embed": attention.embed,
        "pass_hidden": attention.pass_hidden,
        "pre_attention": attention.pre_attention,
        "attention": attention.attention,
        "load_kv": attention.load_kv,
        "offload_kv": attention.offload_kv,
        "offload_qkv": attention.offload_qkv,
        "cpu_attention": attention.cpu_attention,
        "load_hidden": attention.load_hidden,
        "post_attention": experts.post_attention,
        "route": experts.route,
        "preview_route": experts.preview_route,
        "offload_routed": experts.offload_routed,
        "run_expert": experts.run_expert,
        "warm_expert": experts.warm_expert,
        "load_routed": experts.load_routed,
        "combine": experts.combine,
        "sample": experts.sample,
    }
    if plan.nodes.count > 1:
        verbs |= verbs_of_nodes(plan, experts, board)
    return verbs


def verbs_of_nodes(plan: Plan, experts: Experts, board: Board) -> dict[str, Verb]:
    """The functions of the verbs that are added or replaced where several nodes share the experts."""
    exchanges = Exchanges(plan.nodes, experts, board)
    verbs: dict[str, Verb] = {"partial_sum": exchanges.partial_sum}
    if not plan.nodes.centralised:
        return verbs | {"all_reduce": exchanges.all_reduce}
    verbs |= {"gather": exchanges.gather, "broadcast": exchanges.broadcast}
    if plan.nodes.attends:
        return verbs | {"route": exchanges.route_for_all, "sample": exchanges.sample_for_all}
    return verbs | {"route": experts.chosen, "sample": exchanges.sampled}
