"""A model whose decode steps are nearly all the host's own time: its matrices stay in a cache."""

from __future__ import annotations

from moesched.models.config import ModelConfig
from moesched.models.shapes import SHAPES


def small_shape(model: str) -> ModelConfig:
    """The layers of a shape of `moesched list models`, with small matrices."""
    sizes = {
        "hidden": 128,
        "intermediate": 128,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "vocabulary": 1024,
    }
    return SHAPES[model].varied(**sizes)
