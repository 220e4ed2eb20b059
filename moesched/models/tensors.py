"""The weight tensors of a model, by canonical name, and their shapes.

    embedding, final_norm, lm_head (absent when tied to the embedding)
    layers.{i}.attention_norm, q, k, v, q_norm and k_norm (in models that have them), o, ffn_norm,
        router (absent in a dense model)
    layers.{i}.experts.{e}.gate, up, down

Matrices are stored as (outputs, inputs), so that each row computes one output, or transposed (see `is_transposed`).
"""

from __future__ import annotations

import math

from moesched.models.config import ModelConfig

Shape = tuple[int, ...]


def global_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shapes of the tensors outside the layers."""
    shapes: dict[str, Shape] = {
        "embedding": (config.vocabulary, config.hidden),
        "final_norm": (config.hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocabulary // config.ranks, config.hidden)
    return shapes


def dense_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Shapes of the tensors of a layer that every token uses."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "attention_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
    }
    if config.qk_norm:
        together = config.qk_norm == "projection"
        shapes["q_norm"] = (queries if together else config.head_dim,)
        shapes["k_norm"] = (keys if together else config.head_dim,)
    shapes |= {"o": (hidden, queries), "ffn_norm": (hidden,)}
    if config.experts > 1:
        shapes["router"] = (config.experts, hidden)
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


def expert_shapes(config: ModelConfig, layer: int, expert: int) -> dict[str, Shape]:
    """Shapes of the tensors of one expert, in their usual order in files."""
    prefix = f"layers.{layer}.experts.{expert}."
    return {
        prefix + "gate": (config.intermediate, config.hidden),
        prefix + "down": _down_shape(config),
        prefix + "up": (config.intermediate, config.hidden),
    }


def is_transposed(config: ModelConfig, name: str) -> bool:
    """Whether the checkpoints of this model store a matrix as (inputs, outputs)."""
    return config.transposed_down and name.endswith(".down")


def _down_shape(config: ModelConfig) -> Shape:
    if config.transposed_down:
        return config.intermediate, config.hidden
    return config.hidden, config.intermediate


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shapes of all tensors of the model."""
    shapes = global_shapes(config)
    for layer in range(config.layers):
        shapes |= dense_shapes(config, layer)
        for expert in range(config.experts):
            shapes |= expert_shapes(config, layer, expert)
    return shapes


def count_tensors(config: ModelConfig) -> int:
    """Number of all tensors of the model, without a table of them."""
    per_layer = len(dense_shapes(config, 0)) + config.experts * len(expert_shapes(config, 0, 0))
    return len(global_shapes(config)) + config.layers * per_layer


def count_weights(config: ModelConfig) -> int:
    """Number of items in all tensors of the model, without a table of them."""
    dense, expert, outside = (
        sum(map(math.prod, shapes.values()))
        for shapes in (dense_shapes(config, 0), expert_shapes(config, 0, 0), global_shapes(config))
    )
    return outside + config.layers * (dense + config.experts * expert)
