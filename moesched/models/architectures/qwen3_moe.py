"""Qwen3-MoE: a norm of queries and keys in each head, and many small experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, known_model
from moesched.models.architectures.llama_like import MLP_EXPERTS, LlamaLikeKeys
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.networks import FeedForward, Router


class Qwen3MoeKeys(LlamaLikeKeys, kw_only=True):
    """The keys of a Qwen3-MoE's config.json that are read, with their defaults.

    `intermediate_size` is the inner width of layers without experts, which are not supported.
    """

    aliases = (("num_experts", "num_local_experts"),)

    vocab_size: int = 151936
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    eos_token_id: int | list[int] | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(Qwen3MoeKeys)
    file.require("decoder_sparse_step", keys.decoder_sparse_step, 1)
    file.require("mlp_only_layers", [*keys.mlp_only_layers], [])
    network = FeedForward(
        experts=keys.num_local_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.moe_intermediate_size,
        router=Router(normalised=keys.norm_topk_prob),
    )
    window = keys.sliding_window if keys.use_sliding_window else None
    layer = llama_like.layer(file, keys, network, window=window, qk_norm="head")
    return llama_like.build(file, keys, "qwen3_moe", layer)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    return llama_like.config_json(config) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": config.attention.head_dim,
        "mlp_only_layers": [],
        "moe_intermediate_size": config.routed.intermediate,
        "norm_topk_prob": config.routed.router.normalised,
        "num_experts": config.routed.experts,
        "num_experts_per_tok": config.routed.top_k,
        "output_router_logits": False,
        "sliding_window": config.attention.window,
        "use_sliding_window": config.attention.window is not None,
    }


QWEN3_30B = known_model(
    read,
    "qwen3-30b-a3b",
    num_hidden_layers=48,
    head_dim=128,
    rope_theta=1e6,
    max_position_embeddings=40960,
    eos_token_id=[151645, 151643],
    norm_topk_prob=True,
)

QWEN3_MOE = Architecture(
    model_types=("qwen3_moe",),
    shapes=(QWEN3_30B,),
    sources={"qwen3-30b-a3b": "huggingface.co/Qwen/Qwen3-30B-A3B"},
    read=read,
    config_json=config_json,
    tensors=partial(llama_like.tensors, names=MLP_EXPERTS),
    other_tensors=llama_like.fused_tensors,
    extra_tensors=llama_like.extra_tensors,
)
