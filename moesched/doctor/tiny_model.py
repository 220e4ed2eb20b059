"""A tiny random model whose tokens depend on all of its weights, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layers import FeedForward, GroupedAttention, Layer
from moesched.models.random_model import write_random_model

TINY = ModelConfig(
    name="mixtral",
    pattern=(
        Layer(
            attention=GroupedAttention(heads=4, kv_heads=2, head_dim=128),
            feed_forward=FeedForward(intermediate=192, experts=4, top_k=2),
        ),
    )
    * 4,
    hidden=128,
    vocabulary=512,
    norm_eps=1e-5,
    max_positions=131_072,
    tied_embeddings=False,
    stop_tokens=(),
    dtype="float32",
)
"""The tiny model's shape; its heads have the size that fast GPU kernels of attention are written for."""

PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5], [60]]
NEW_TOKENS = 6
MICRO_BATCH = 2
GAIN = 10
"""Factor of the weights; with usual random weights, each token would depend only on the last one."""


def write_tiny_model(folder: Path) -> Path:
    """Write the tiny model in float32 below a folder; return the model's folder."""
    write_random_model(TINY, folder, dtype="float32")
    for stored in open_checkpoint(folder).tensors.values():
        if len(stored.shape) > 1:
            matrix = np.memmap(stored.file, np.float32, "r+", stored.offset, stored.shape)
            matrix *= GAIN
            matrix.flush()
    return folder
