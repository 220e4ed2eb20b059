"""The configuration of a tiny model, and prompts for it."""

from __future__ import annotations

from moesched.models.shapes import SHAPES

TINY = SHAPES["mixtral-0.8b"].varied(
    4,
    name="mixtral",
    hidden=128,
    vocabulary=512,
    heads=4,
    kv_heads=2,
    head_dim=128,
    intermediate=192,
    experts=4,
    stop_tokens=(),
    dtype="float32",
    max_positions=131_072,
)
"""The tiny model's shape; its heads have the size that fast GPU kernels of attention are written for."""

PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5], [60]]
NEW_TOKENS = 6
MICRO_BATCH = 2
