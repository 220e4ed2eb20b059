"""GLM-4.5, GLM-4.5-Air and GLM-4.7: first layers without experts, a shared expert, biased projections.

Published files also have a multi-token prediction layer, which is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, Stored, known_model
from moesched.models.architectures.llama_like import MLP_EXPERTS, LlamaLikeKeys
from moesched.models.architectures.simulated import prediction_layer
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.networks import FeedForward, Router

STOP = 151336
"""The token that ends the text of the published models."""


class Glm4MoeKeys(LlamaLikeKeys, kw_only=True):
    """The keys of a GLM-4.5's config.json that are read, with their defaults."""

    aliases = (("num_local_experts", "n_routed_experts"), ("num_mtp_layers", "num_nextn_predict_layers"))

    vocab_size: int = 151552
    hidden_size: int = 4096
    num_hidden_layers: int = 46
    eos_token_id: int | list[int] | None = None
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_attention_heads: int = 96
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = 0.5
    use_qk_norm: bool = False
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(Glm4MoeKeys)
    file.require_layers(keys.num_hidden_layers)
    if keys.first_k_dense_replace >= keys.num_hidden_layers:
        what = f"first_k_dense_replace is {keys.first_k_dense_replace:,}"
        raise file.impossible(what, f"num_hidden_layers is {keys.num_hidden_layers:,}")
    for key in ("first_k_dense_replace", "num_nextn_predict_layers"):
        file.require_size(key, getattr(keys, key), least=0)
    for key in ("n_shared_experts", "moe_intermediate_size", "intermediate_size"):
        file.require_size(key, getattr(keys, key))
    routed = FeedForward(
        experts=keys.n_routed_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.moe_intermediate_size,
        shared=keys.n_shared_experts * keys.moe_intermediate_size,
        router=Router(
            score="sigmoid",
            corrected=True,
            normalised=keys.norm_topk_prob,
            scale=keys.routed_scaling_factor,
            groups=keys.n_group,
            kept_groups=keys.topk_group,
        ),
    )
    kinds = [
        llama_like.layer(
            file,
            keys,
            network,
            partial=True,
            qk_norm="head" if keys.use_qk_norm else None,
            biases="qkv" if keys.attention_bias else "",
        )
        for network in (FeedForward(shared=keys.intermediate_size), routed)
    ]
    dense = keys.first_k_dense_replace
    pattern = [kinds[0]] * dense + [kinds[1]] * (keys.num_hidden_layers - dense)
    config = llama_like.build(file, replace(keys, attention_bias=False), "glm4_moe", *pattern)
    unused = keys.num_nextn_predict_layers * prediction_layer(config, copies=2)
    return replace(config, unused_weights=unused)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    attention, routed, first = config.attention, config.routed, config.layer(0).feed_forward
    return llama_like.config_json(config) | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": bool(attention.biases),
        "first_k_dense_replace": sum(not layer.feed_forward.experts for layer in config.pattern),
        "head_dim": attention.head_dim,
        "intermediate_size": first.shared if not first.experts else routed.intermediate,
        "moe_intermediate_size": routed.intermediate,
        "n_group": routed.router.groups,
        "n_routed_experts": routed.experts,
        "n_shared_experts": routed.shared // routed.intermediate,
        "norm_topk_prob": routed.router.normalised,
        "num_experts_per_tok": routed.top_k,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": attention.rotary.turning(attention.head_dim) / attention.head_dim,
        "routed_scaling_factor": routed.router.scale,
        "topk_group": routed.router.kept_groups,
        "use_qk_norm": attention.qk_norm is not None,
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of published checkpoints, but not of multi-token prediction layers."""
    yield from llama_like.tensors(config, MLP_EXPERTS)
    yield from _beside_experts(config)


def extra_tensors(config: ModelConfig) -> Iterator[str]:
    """Yield name patterns of tensors that are not needed: multi-token prediction layers, and rotary frequencies."""
    yield from llama_like.extra_tensors(config)
    yield f"model.layers.{config.layers}.*"


def _beside_experts(config: ModelConfig) -> Iterator[Stored]:
    for number, layer in enumerate(config.pattern):
        block, ours = f"model.layers.{number}.mlp.", f"layers.{number}."
        shared = block
        if layer.feed_forward.experts:
            shared += "shared_experts."
            yield Stored(block + "gate.e_score_correction_bias", [ours + "router_bias"])
        for part in ("gate", "up", "down"):
            yield Stored(f"{shared}{part}_proj.weight", [f"{ours}shared_{part}"])


_PUBLISHED: dict[str, Any] = {
    "eos_token_id": STOP,
    "head_dim": 128,
    "rope_theta": 1e6,
    "attention_bias": True,
}
"""Keys that the published models have in common."""
_LARGE: dict[str, Any] = _PUBLISHED | {
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}

GLM4_MOE = Architecture(
    model_types=("glm4_moe",),
    shapes=(
        known_model(read, "glm-4.5", **_LARGE),
        known_model(read, "glm-4.5-air", **_PUBLISHED),
        known_model(read, "glm-4.7", max_position_embeddings=202752, **_LARGE),
    ),
    sources={
        "glm-4.5": "huggingface.co/zai-org/GLM-4.5",
        "glm-4.5-air": "huggingface.co/zai-org/GLM-4.5-Air",
        "glm-4.7": "huggingface.co/zai-org/GLM-4.7",
    },
    read=read,
    left_out=("embedding", "lm_head"),
    config_json=config_json,
    tensors=tensors,
    other_tensors=llama_like.fused_tensors,
    extra_tensors=extra_tensors,
)
