"""The table of verbs: the implementation of each one, by the machine and the ranks or nodes of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moesched.tasks import Task

from ..shared.node_exchanges import NodeVerbs
from ..shared.verbs import Verb, after
from .attention import Attention
from .beams import BeamSearches
from .host_experts import HostExperts
from .host_side import HostSide
from .moe_layer import MoELayer
from .next_tokens import NextTokens
from .rank_side import RankSide
from .weights import WeightStore


class Parts(NamedTuple):
    """The parts of a batch that run verbs.

    Attributes:
        tokens: None on a node that does not attend.
        beams: None without beam search.
        host, host_experts: None on a machine with one memory.
        rank: None unless the model is cut over ranks.
        node: None unless nodes share the experts.
    """

    store: WeightStore
    attention: Attention
    moe: MoELayer
    tokens: NextTokens | None
    beams: BeamSearches | None
    host: HostSide | None
    host_experts: HostExperts | None
    rank: RankSide | None
    node: NodeVerbs | None


def verbs_of(parts: Parts) -> dict[str, Verb]:
    """The implementation of every verb of a batch.

    Those that may be a native call enter torch's inference mode themselves, where they use torch: to enter it takes
    longer than all else that Python does for such a call.
    """
    attention, moe, tokens = parts.attention, parts.moe, parts.tokens
    native: list[Verb] = [attention.embed, attention.pre_attention, attention.attention, moe.post_attention]
    if tokens:
        native.append(tokens.sample_next)
    if parts.host:
        native.append(parts.host.cpu_attention)
    return {name: verb if verb in native else _inferring(verb) for name, verb in _table(parts).items()}


def _inferring(verb: Verb) -> Verb:
    def run(task: Task) -> Any:
        with torch.inference_mode():
            return verb(task)

    return run


def _table(parts: Parts) -> dict[str, Verb]:
    store, attention, moe, tokens, beams, host, host_experts, rank, node = parts
    verbs: dict[str, Verb] = {
        "load": store.load,
        "fetch": host.bring if host else store.fetch,
        "copy_to_pinned": host.bring if host else store.fetch,
        "embed": attention.embed,
        "pre_attention": attention.pre_attention,
        "attention": host.attention if host else attention.attention,
        "cpu_attention": host.cpu_attention if host else attention.attention,
        "output_projection": attention.project_output,
        "post_attention": moe.run_all if rank else moe.post_attention,
        "route": moe.choose_experts if rank else after(attention.project_output, moe.choose_experts),
        "preview_route": moe.preview_route,
        "run_expert": host_experts.run_expert if host_experts else moe.run_expert,
        "warm_expert": moe.warm_expert,
        "combine": moe.combine,
    }
    if tokens:
        verbs["sample"] = tokens.sample_next
    if beams:
        verbs["reorder"] = beams.reorder
    if host:
        verbs |= {
            "offload_qkv": host.offload_qkv,
            "load_hidden": host.load_hidden,
            "offload_kv": host.offload_kv,
            "load_kv": host.load_kv,
        }
    if host_experts:
        verbs |= {"offload_routed": host_experts.offload_routed, "load_routed": host_experts.load_routed}
    if rank:
        verbs |= {"all_reduce": rank.all_reduce, "logits": rank.logits, "sample": rank.sample}
    if node:
        verbs |= node.verbs  # sums and exchanges over nodes instead of `combine`, `route` and `sample` here
    return verbs
