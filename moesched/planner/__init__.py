"""The planner: finds the policy and the sizes with which a model generates the most tokens per second on a machine.

First the search of MoE-Lightning gives each policy's best sizes and an upper bound on its throughput, which assumes
that lanes overlap perfectly. Then the schedules themselves are simulated on the virtual clock, the most promising
first, until no remaining bound comes near the best result.
"""

from __future__ import annotations

from moesched.planner.cluster import ClusterProposal, plan_cluster
from moesched.planner.proposal import MOST_REQUESTS, Proposal, plan_model
from moesched.planner.search_policies import (
    FIRST,
    BestPlan,
    PolicyEstimate,
    fastest_policies,
    plan_best,
    plannable,
    require_one_policy,
)
from moesched.planner.setting import KV_SHARE, Setting, splits_kv

__all__ = [
    "FIRST",
    "KV_SHARE",
    "MOST_REQUESTS",
    "BestPlan",
    "ClusterProposal",
    "PolicyEstimate",
    "Proposal",
    "Setting",
    "fastest_policies",
    "plan_best",
    "plan_cluster",
    "plan_model",
    "plannable",
    "require_one_policy",
    "splits_kv",
]
