"""The shipped policies that run on a GPU and its host, with settings for tiny models."""

from __future__ import annotations

POLICIES: list[tuple[str, dict[str, int]]] = [
    ("resident", {}),
    ("layer_streaming", {}),
    ("cgopipe", {}),
    ("fastdecode", {}),
    ("flexgen", {}),
    ("flexgen_cpu", {}),
    ("expert_streaming", {}),
    ("cpu_ffn", {}),
    ("layer_split", {"gpu_layers": 1}),
    ("lru_offload", {"offload_per_layer": 2}),
    ("expert_cache", {"experts": 4}),
    ("prefetch_gate", {"offload_per_layer": 2}),
    ("twiddler", {"experts": 4}),
    ("three_tiers", {}),
    ("flexgen_synchronous", {}),
    ("flexgen_pipeline", {}),
    ("twiddler_makespan", {"experts": 4}),
    ("hybrimoe", {"experts": 4}),
    ("frequency_cache", {"experts": 4}),
    ("least_stale", {"experts": 4}),
    ("fate", {"offload_per_layer": 2}),
    ("moe_gen", {}),
    ("adversarial", {"seed": 1}),
    ("moesched.testing.random_rows:RandomRows", {"seed": 1}),
]

STREAM_MOST = {
    "layer_streaming", "cgopipe", "flexgen", "flexgen_cpu", "expert_streaming", "cpu_ffn", "layer_split",
    "three_tiers", "flexgen_synchronous", "flexgen_pipeline", "moe_gen",
}  # fmt: skip
"""Policies that run where fast memory has room for a part of the weights; others stream by settings, or keep all."""
