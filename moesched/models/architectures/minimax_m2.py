"""MiniMax-M2: many small experts chosen by sigmoid scores plus a bias; half of each head is rotated.

The norms of queries and keys are over all heads together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, Stored, known_model
from moesched.models.architectures.llama_like import BLOCK_SPARSE_EXPERTS, LlamaLikeKeys
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.networks import FeedForward, Router

ROUTER = Router(score="sigmoid", corrected=True)
BIAS = "e_score_correction_bias"


class MiniMaxM2Keys(LlamaLikeKeys, kw_only=True):
    """The keys of a MiniMax-M2's config.json that are read, with their defaults."""

    aliases = (("num_experts", "num_local_experts"),)

    vocab_size: int = 200064
    hidden_size: int = 3072
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    head_dim: int | None = 128
    max_position_embeddings: int = 196608
    eos_token_id: int | list[int] | None = 200020
    intermediate_size: int = 1536
    rope_theta: float = 5e6
    rotary_dim: int | None = None
    use_qk_norm: bool = True
    use_routing_bias: bool = True
    scoring_func: str = "sigmoid"
    shared_intermediate_size: int = 0
    num_local_experts: int = 256
    num_experts_per_tok: int = 8


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(MiniMaxM2Keys)
    file.require("use_qk_norm", keys.use_qk_norm, True)
    file.require("use_routing_bias", keys.use_routing_bias, True)
    file.require("scoring_func", keys.scoring_func, "sigmoid")
    file.require("shared_intermediate_size", keys.shared_intermediate_size, 0)
    if keys.rotary_dim is not None:
        file.require_size("rotary_dim", keys.rotary_dim)
        if keys.partial_rotary_factor is None and keys.head_dim:
            keys = replace(keys, partial_rotary_factor=keys.rotary_dim / keys.head_dim)
    network = FeedForward(
        experts=keys.num_local_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.intermediate_size,
        router=ROUTER,
    )
    layer = llama_like.layer(file, keys, network, partial=True, qk_norm="projection")
    return llama_like.build(file, keys, "minimax_m2", layer)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    attention = config.attention
    return llama_like.config_json(config) | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": attention.head_dim,
        "intermediate_size": config.routed.intermediate,
        "num_experts_per_tok": config.routed.top_k,
        "num_local_experts": config.routed.experts,
        "rotary_dim": attention.rotary.turning(attention.head_dim),
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of published checkpoints."""
    yield from llama_like.tensors(config, BLOCK_SPARSE_EXPERTS)
    for layer in range(config.layers):
        yield Stored(f"model.layers.{layer}.block_sparse_moe.{BIAS}", [f"layers.{layer}.router_bias"])


def fused_tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield tensors for routers and experts as transformers has them in memory: a layer's experts are two tensors."""
    yield from llama_like.fused_tensors(config)
    for layer in range(config.layers):
        yield Stored(f"model.layers.{layer}.mlp.{BIAS}", [f"layers.{layer}.router_bias"])


_M2 = known_model(read, "minimax-m2", rotary_dim=64)

MINIMAX_M2 = Architecture(
    model_types=("minimax_m2",),
    shapes=(replace(_M2, format="fp8"),),
    sources={"minimax-m2": "huggingface.co/MiniMaxAI/MiniMax-M2"},
    read=read,
    left_out=("embedding",),
    config_json=config_json,
    tensors=tensors,
    other_tensors=fused_tensors,
    extra_tensors=llama_like.extra_tensors,
)
