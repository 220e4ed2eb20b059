"""The weight tensors of a model, by canonical name, and their shapes.

    embedding, final_norm, lm_head (absent when tied to the embedding)
    layers.{i}.attention_norm, q, k, v, q_norm and k_norm (in models that have them), o, ffn_norm,
        router (absent in a dense model), shared_gate, shared_down, shared_up (in layers that have them);
        other kinds of attention have other names (see `layers.py`)
    layers.{i}.experts.{e}.gate, up, down; gate_up, whose rows alternate between gate and up, in models that have it

Matrices are stored as (outputs, inputs), so that each row computes one output, or transposed (see `is_transposed`).
"""

from __future__ import annotations

from collections.abc import Collection

from moesched.models.config import ModelConfig
from moesched.models.layers import Layer
from moesched.models.tensor_shapes import Shape, elements


def global_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes, by name, of the tensors outside the layers."""
    shapes: dict[str, Shape] = {
        "embedding": (config.vocabulary, config.hidden),
        "final_norm": (config.hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocabulary // config.ranks, config.hidden)
    return shapes


def dense_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Return the shapes, by name, of a layer's tensors that every token uses."""
    shapes = _dense(config.layer(layer), config.hidden)
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


def expert_shapes(config: ModelConfig, layer: int, expert: int) -> dict[str, Shape]:
    """Return the shapes of one expert's tensors, by name in files' usual order; empty if there is no such expert."""
    feed_forward = config.layer(layer).feed_forward
    if expert >= feed_forward.experts:
        return {}
    shapes = feed_forward.expert_shapes(config.hidden)
    return {f"layers.{layer}.experts.{expert}.{name}": shape for name, shape in shapes.items()}


def is_transposed(config: ModelConfig, name: str) -> bool:
    """Test whether the checkpoints of this model store a matrix, given by its canonical name, as (inputs, outputs)."""
    return config.routed.transposed_down and name.endswith((".down", ".gate_up"))


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all tensors of the model, by canonical name."""
    shapes = global_shapes(config)
    for layer in range(config.layers):
        shapes |= dense_shapes(config, layer)
        for expert in range(config.layer(layer).feed_forward.experts):
            shapes |= expert_shapes(config, layer, expert)
    return shapes


def count_tensors(config: ModelConfig) -> int:
    """Return the number of tensors of the model, without listing them."""
    count = len(global_shapes(config))
    for number, times, experts in _examples(config):
        one = expert_shapes(config, number, 0)
        count += times * (len(dense_shapes(config, number)) + experts * len(one))
    return count


def count_weights(config: ModelConfig) -> int:
    """Return the number of weights of the model, without listing its tensors."""
    count = elements(global_shapes(config).values())
    for number, times, experts in _examples(config):
        one = elements(expert_shapes(config, number, 0).values())
        count += times * (elements(dense_shapes(config, number).values()) + experts * one)
    return count


def count_active_weights(config: ModelConfig, left_out: Collection[str] = ()) -> int:
    """Return the number of weights used for one token: all except the experts that the token does not choose.

    Args:
        left_out: names of tensors outside the layers that are not counted, since publishers count differently; an
            embedding that is also the LM head is always counted.
    """
    active = count_weights(config)
    for number, times, experts in _examples(config):
        idle = experts - config.layer(number).feed_forward.top_k if experts else 0
        active -= times * idle * elements(expert_shapes(config, number, 0).values())
    shapes = {} if config.tied_embeddings else global_shapes(config)
    return active - elements(shape for name, shape in shapes.items() if name in left_out)


def file_bytes(config: ModelConfig) -> int:
    """Return the bytes of all weights in the model's storage format, as in published files.

    Weights that text generation does not need are counted in the storage format of attention's matrices.
    """
    dtype = config.dtype
    total = sum(
        elements([shape]) * config.tensor_bytes(name, shape, dtype)
        for name, shape in global_shapes(config).items()
    )
    for number, times, experts in _examples(config):
        for shapes, copies in (
            (dense_shapes(config, number), 1),
            (expert_shapes(config, number, 0), experts),
        ):
            total += sum(
                times * copies * elements([shape]) * config.tensor_bytes(name, shape, dtype)
                for name, shape in shapes.items()
            )
    return round(total + config.unused_weights * config.weight_bytes("matrix", 0, dtype))


def _dense(layer: Layer, hidden: int) -> dict[str, Shape]:
    attention = layer.attention
    shapes: dict[str, Shape] = {"attention_norm": (hidden,)}
    shapes |= attention.shapes_before(hidden) | attention.shapes_after(hidden)
    shapes["ffn_norm"] = (hidden,)
    if layer.norms > 2:
        shapes["further_norm"] = ((layer.norms - 2) * hidden,)
    return shapes | layer.feed_forward.shapes(hidden)


def _examples(config: ModelConfig) -> list[tuple[int, int, int]]:
    """Return (number of the first layer, number of layers, number of experts per layer) for each kind of layer."""
    return [
        (config.pattern.index(layer), times, layer.feed_forward.experts)
        for layer, times in config.kinds.items()
    ]
