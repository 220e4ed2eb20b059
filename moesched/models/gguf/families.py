"""The families of models in GGUF files: functions that convert metadata to keys of config.json, and tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moesched.errors import BadInput
from moesched.models.architectures import gpt_oss
from moesched.models.config import ModelConfig
from moesched.models.gguf.keys import SIGMOID, SOFTMAX, GgufKeys
from moesched.models.networks import SILU, Activation


class GgufFamily(NamedTuple):
    """One family of models in GGUF files, which is one value of `general.architecture`.

    Attributes:
        forms: keys of `ARCHITECTURES` for models of the family.
        config_json: function that converts metadata to keys of config.json with the same meaning.
        needed: the keys, without the architecture's name, that a file must have beside those of all families.
        names: for canonical names of tensors, the names in files that differ from those in `NAMES`.
        fused: for each tensor in files that contains several of the model's tensors, the names of these, in order.
        interleaved: whether rows of queries and keys are ordered for a rotary embedding that pairs neighbours.
        partial: whether the rotary embedding may rotate only a part of each head.
        dense_first: whether the first layers may have no experts.
        rotation_switch: whether the key `rope.scaling.finetuned` tells if queries and keys are rotated at all.
        windows_in_turn: whether only every other layer has a sliding window, beginning with the first; otherwise all
            layers have it, if any.
        truncate: YaRN's setting of this name, for which GGUF files have no key.
        activation: the activation of experts, for which GGUF files have no key.
        score: function from router logits to scores, as in `expert_gating_func`: `SOFTMAX` or `SIGMOID`.
    """

    forms: tuple[str, ...]
    config_json: Callable[[GgufKeys], dict[str, Any]]
    needed: tuple[str, ...]
    names: Mapping[str, str] = MappingProxyType({})
    fused: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    interleaved: bool = False
    partial: bool = False
    dense_first: bool = False
    rotation_switch: bool = False
    windows_in_turn: bool = False
    truncate: bool = True
    activation: Activation = SILU
    score: int = SOFTMAX


def _llama_like(keys: GgufKeys) -> dict[str, Any]:
    """Return the keys of config.json that architectures derived from Llama have in common."""
    return {
        "hidden_size": keys.embedding_length,
        "intermediate_size": keys.feed_forward_length,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.attention__head_count,
        "num_key_value_heads": keys.kv_heads,
        "head_dim": keys.head_dim,
        "rms_norm_eps": keys.attention__layer_norm_rms_epsilon or 0.0,
        "max_position_embeddings": keys.context_length,
        "rope_theta": keys.rope__freq_base,
        "sliding_window": keys.attention__sliding_window,
        "num_local_experts": keys.expert_count,
        "num_experts_per_tok": keys.expert_used_count,
        "clip_qkv": keys.attention__clamp_kqv,
    }


def _llama(keys: GgufKeys) -> dict[str, Any]:
    return _llama_like(keys) | {"model_type": "mixtral" if keys.expert_count else "mistral"}


def _qwen3_moe(keys: GgufKeys) -> dict[str, Any]:
    return _llama_like(keys) | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": keys.expert_feed_forward_length or keys.feed_forward_length,
        "norm_topk_prob": True,
        "use_sliding_window": keys.attention__sliding_window is not None,
    }


def _olmoe(keys: GgufKeys) -> dict[str, Any]:
    return _llama_like(keys) | {"model_type": "olmoe", "norm_topk_prob": False}


def _granite_moe(keys: GgufKeys) -> dict[str, Any]:
    return _llama_like(keys) | {
        "model_type": "granitemoe",
        "attention_multiplier": keys.attention__scale or max(keys.head_dim, 1) ** -0.5,
        "embedding_multiplier": keys.embedding_scale or 1.0,
        "residual_multiplier": keys.residual_scale or 1.0,
        "logits_scaling": keys.logit_scale or 1.0,
    }


def _minimax_m2(keys: GgufKeys) -> dict[str, Any]:
    return _llama_like(keys) | {
        "model_type": "minimax_m2",
        "intermediate_size": keys.expert_feed_forward_length or keys.feed_forward_length,
        "rotary_dim": keys.rope__dimension_count,
    }


def _glm4_moe(keys: GgufKeys) -> dict[str, Any]:
    rotated = keys.rope__dimension_count
    return _llama_like(keys) | {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": keys.leading_dense_block_count or 0,
        "moe_intermediate_size": keys.expert_feed_forward_length,
        "n_group": keys.expert_group_count or 1,
        "n_routed_experts": keys.expert_count,
        "n_shared_experts": keys.expert_shared_count,
        "norm_topk_prob": keys.expert_weights_norm,
        "num_nextn_predict_layers": keys.nextn_predict_layers or 0,
        "partial_rotary_factor": None if rotated is None else rotated / max(keys.head_dim, 1),
        "routed_scaling_factor": keys.expert_weights_scale,
        "topk_group": keys.expert_group_used_count or 1,
    }


def _gpt_oss(keys: GgufKeys) -> dict[str, Any]:
    scaled = keys.rotation_kind != "none"  # without keys of a rotation, config.json means YaRN
    rotary = {"rope_type": "default", "rope_theta": keys.rope__freq_base}
    return _llama_like(keys) | {
        "model_type": "gpt_oss",
        "intermediate_size": keys.expert_feed_forward_length or keys.feed_forward_length,
        "rope_parameters": None if scaled else rotary,
    }


def _dbrx(keys: GgufKeys) -> dict[str, Any]:
    return {
        "model_type": "dbrx",
        "d_model": keys.embedding_length,
        "n_heads": keys.attention__head_count,
        "n_layers": keys.block_count,
        "max_seq_len": keys.context_length,
        "attn_config": {
            "clip_qkv": keys.attention__clamp_kqv,
            "kv_n_heads": keys.kv_heads,
            "rope_theta": keys.rope__freq_base,
        },
        "ffn_config": {
            "ffn_hidden_size": keys.feed_forward_length,
            "moe_num_experts": keys.expert_count,
            "moe_top_k": keys.expert_used_count,
        },
    }


_EPSILON, _WIDTH = "attention.layer_norm_rms_epsilon", "feed_forward_length"
_EXPERTS = "expert_count", "expert_used_count"

GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily(("mixtral", "llama"), _llama, (_EPSILON, _WIDTH), interleaved=True),
        "qwen3moe": GgufFamily(("qwen3_moe",), _qwen3_moe, (_EPSILON, *_EXPERTS)),
        "olmoe": GgufFamily(("olmoe",), _olmoe, (_EPSILON, _WIDTH, *_EXPERTS)),
        "granitemoe": GgufFamily(
            ("granite_moe",),
            _granite_moe,
            (_EPSILON, _WIDTH, *_EXPERTS),
            interleaved=True,
            rotation_switch=True,
        ),
        "minimax-m2": GgufFamily(
            ("minimax_m2",), _minimax_m2, (_EPSILON, *_EXPERTS), partial=True, score=SIGMOID
        ),
        "glm4moe": GgufFamily(
            ("glm4_moe",),
            _glm4_moe,
            (
                _EPSILON,
                _WIDTH,
                *_EXPERTS,
                "expert_feed_forward_length",
                "expert_shared_count",
                "expert_weights_norm",
                "expert_weights_scale",
            ),
            names={"ffn_norm": "post_attention_norm"},
            partial=True,
            dense_first=True,
            score=SIGMOID,
        ),
        "gpt-oss": GgufFamily(
            ("gpt_oss",),
            _gpt_oss,
            (_EPSILON, *_EXPERTS),
            names={"ffn_norm": "post_attention_norm", "router_bias": "ffn_gate_inp"},
            windows_in_turn=True,
            truncate=False,
            activation=Activation(alpha=gpt_oss.ALPHA, limit=gpt_oss.LIMIT),
        ),
        "dbrx": GgufFamily(
            ("dbrx",),
            _dbrx,
            (_WIDTH, *_EXPERTS),
            names={"ffn_norm": "attn_output_norm"},
            fused={"attn_qkv": ("q", "k", "v")},
        ),
    }
)
"""Families that run, by `general.architecture`."""


def architecture_of(config: ModelConfig) -> str:
    """Return the name of a model's architecture in GGUF files.

    Raises:
        BadInput: GGUF files of the model's family cannot be written.
    """
    found = next((name for name, each in GGUF_FAMILIES.items() if config.form in each.forms), None)
    if found is None:
        raise BadInput(
            f"{config.name}: GGUF files of the family {config.form} are not written: name a folder"
        )
    return found
