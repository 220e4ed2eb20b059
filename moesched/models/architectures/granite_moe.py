"""Granite-MoE: constant factors multiply embeddings, attention scores, outputs of attention and experts, and logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, Stored, known_model
from moesched.models.architectures.llama_like import LlamaLikeKeys
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.networks import FeedForward, Router


class GraniteMoeKeys(LlamaLikeKeys, kw_only=True):
    """The keys of a Granite-MoE's config.json that are read, with their defaults."""

    intermediate_size: int = 11008
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(GraniteMoeKeys)
    file.require_number("logits_scaling", keys.logits_scaling)
    network = FeedForward(
        experts=keys.num_local_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.intermediate_size,
        router=Router(scale=keys.residual_multiplier),
    )
    layer = llama_like.layer(file, keys, network, scale=keys.attention_multiplier)
    config = llama_like.build(file, keys, "granite_moe", layer)
    return file.checked(
        replace(
            config,
            embedding_factor=keys.embedding_multiplier,
            residual_factor=keys.residual_multiplier,
            logits_factor=1 / keys.logits_scaling,
        )
    )


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    return llama_like.config_json(config) | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "attention_multiplier": config.attention.score_scale,
        "embedding_multiplier": config.embedding_factor,
        "head_dim": config.attention.head_dim,
        "intermediate_size": config.routed.intermediate,
        "logits_scaling": 1 / config.logits_factor,
        "num_experts_per_tok": config.routed.top_k,
        "num_local_experts": config.routed.experts,
        "residual_multiplier": config.residual_factor,
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of published checkpoints.

    One tensor has the gate and up matrices of all experts of a layer, another one their down matrices.
    """
    yield from llama_like.global_tensors(config)
    for layer in range(config.layers):
        block, ours = f"model.layers.{layer}.block_sparse_moe.", f"layers.{layer}."
        experts = [f"{ours}experts.{expert}." for expert in range(config.routed.experts)]
        gate_up = [expert + part for expert in experts for part in ("gate", "up")]
        yield from llama_like.attention_tensors(config, layer)
        yield Stored(block + "router.layer.weight", [ours + "router"])
        yield Stored(block + "input_linear.weight", gate_up, stacks=len(experts))
        yield Stored(block + "output_linear.weight", [expert + "down" for expert in experts], len(experts))


_PUBLISHED: dict[str, Any] = {
    "vocab_size": 49155,
    "num_key_value_heads": 8,
    "intermediate_size": 512,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "attention_multiplier": 1 / 64,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
"""Keys that the published models have in common."""


def _of(name: str, **keys: Any) -> ModelConfig:
    return known_model(read, f"granite-3.0-{name}", **_PUBLISHED, **keys)


GRANITE_MOE = Architecture(
    model_types=("granitemoe",),
    shapes=(
        _of("1b-a400m", num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, num_local_experts=32),
        _of("3b-a800m", hidden_size=1536, num_attention_heads=24, num_local_experts=40),
    ),
    sources={
        "granite-3.0-1b-a400m": "huggingface.co/ibm-granite/granite-3.0-1b-a400m-base",
        "granite-3.0-3b-a800m": "huggingface.co/ibm-granite/granite-3.0-3b-a800m-base",
    },
    read=read,
    config_json=config_json,
    tensors=tensors,
    extra_tensors=llama_like.extra_tensors,
)
