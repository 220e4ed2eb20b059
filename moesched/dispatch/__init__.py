"""The kit of policy authors: placement, eviction rules, expert latencies, makespans, and base classes.

    from moesched.dispatch import ExpertLatencies, keep_dense, keep_experts, order_of, popularity_of

The names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesched.dispatch.adaptive_replacement import AdaptiveReplacement
    from moesched.dispatch.cached_experts import CachedExperts
    from moesched.dispatch.cached_layers import CachedLayers
    from moesched.dispatch.eviction import (
        FrequencyClasses,
        LeastFrequentlyUsed,
        LeastRecentlyUsed,
        LeastRecentStep,
        LeastStale,
        LowestRank,
        LowestScore,
    )
    from moesched.dispatch.expert_latencies import ExpertLatencies
    from moesched.dispatch.expert_placement import (
        Expert,
        Popularity,
        Routed,
        keep_dense,
        keep_experts,
        leave_on_host,
        order_of,
        popularity_of,
        seconds_of,
        tokens_of,
        users_of,
    )
    from moesched.dispatch.expert_pool import ExpertPool, all_fit, experts_that_fit, host_has_experts
    from moesched.dispatch.kv_placement import (
        attend,
        attend_on_accelerator,
        place_kv_and_dense,
        place_kv_that_fits,
        split_kv,
    )
    from moesched.dispatch.layer_by_layer import LayerByLayer
    from moesched.dispatch.layer_decisions import Division, LayerDecisions
    from moesched.dispatch.layer_makespan import Layer, LayerCosts, LayerDecision, decide
    from moesched.dispatch.node_placement import (
        Load,
        Placement,
        assign,
        assign_by_rows,
        best_placement,
        expected_load,
        mirrored,
        parts_for,
    )
    from moesched.dispatch.node_steps import LeastRecent, NodeExperts, experts_per_node, run_own, warm_spare
    from moesched.dispatch.pooled_experts import PooledExperts
    from moesched.dispatch.predictors import FollowingExperts, Forecast, Forecasts, LaterRouters, Predictor
    from moesched.dispatch.prefetches import Prefetches
    from moesched.dispatch.resident_pages import double_buffered, keep_beside_buffer

_NAMES = {
    "adaptive_replacement": ("AdaptiveReplacement",),
    "cached_experts": ("CachedExperts",),
    "cached_layers": ("CachedLayers",),
    "eviction": (
        "FrequencyClasses",
        "LeastFrequentlyUsed",
        "LeastRecentlyUsed",
        "LeastRecentStep",
        "LeastStale",
        "LowestRank",
        "LowestScore",
    ),
    "expert_latencies": ("ExpertLatencies",),
    "expert_placement": (
        "Expert",
        "Popularity",
        "Routed",
        "keep_dense",
        "keep_experts",
        "leave_on_host",
        "order_of",
        "popularity_of",
        "seconds_of",
        "tokens_of",
        "users_of",
    ),
    "expert_pool": ("ExpertPool", "all_fit", "experts_that_fit", "host_has_experts"),
    "kv_placement": (
        "attend",
        "attend_on_accelerator",
        "place_kv_and_dense",
        "place_kv_that_fits",
        "split_kv",
    ),
    "layer_by_layer": ("LayerByLayer",),
    "layer_decisions": ("Division", "LayerDecisions"),
    "layer_makespan": ("Layer", "LayerCosts", "LayerDecision", "decide"),
    "node_placement": (
        "Load",
        "Placement",
        "assign",
        "assign_by_rows",
        "best_placement",
        "expected_load",
        "mirrored",
        "parts_for",
    ),
    "node_steps": ("LeastRecent", "NodeExperts", "experts_per_node", "run_own", "warm_spare"),
    "pooled_experts": ("PooledExperts",),
    "predictors": ("FollowingExperts", "Forecast", "Forecasts", "LaterRouters", "Predictor"),
    "prefetches": ("Prefetches",),
    "resident_pages": ("double_buffered", "keep_beside_buffer"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "AdaptiveReplacement",
    "CachedExperts",
    "CachedLayers",
    "Division",
    "Expert",
    "ExpertLatencies",
    "ExpertPool",
    "FollowingExperts",
    "Forecast",
    "Forecasts",
    "FrequencyClasses",
    "LaterRouters",
    "Layer",
    "LayerByLayer",
    "LayerCosts",
    "LayerDecision",
    "LayerDecisions",
    "LeastFrequentlyUsed",
    "LeastRecent",
    "LeastRecentStep",
    "LeastRecentlyUsed",
    "LeastStale",
    "Load",
    "LowestRank",
    "LowestScore",
    "NodeExperts",
    "Placement",
    "PooledExperts",
    "Popularity",
    "Predictor",
    "Prefetches",
    "Routed",
    "all_fit",
    "assign",
    "assign_by_rows",
    "attend",
    "attend_on_accelerator",
    "best_placement",
    "decide",
    "double_buffered",
    "expected_load",
    "experts_per_node",
    "experts_that_fit",
    "host_has_experts",
    "keep_beside_buffer",
    "keep_dense",
    "keep_experts",
    "leave_on_host",
    "mirrored",
    "order_of",
    "parts_for",
    "place_kv_and_dense",
    "place_kv_that_fits",
    "popularity_of",
    "run_own",
    "seconds_of",
    "split_kv",
    "tokens_of",
    "users_of",
    "warm_spare",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
