"""Families in GGUF files: the name of each, its keys of config.json, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.models.architectures.architecture import Stored
from moesched.models.config import ModelConfig
from moesched.models.rotary import Linear, Yarn
from moesched.models.tensors import dense_shapes, expert_shapes, global_shapes

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


class GgufKeys(msgspec.Struct, kw_only=True, rename=lambda name: name.replace("__", ".")):
    """Keys of the metadata that describe a model, without the name of the architecture before them."""

    vocab_size: int | None = None
    block_count: int
    context_length: int
    embedding_length: int
    attention__head_count: int
    feed_forward_length: int = 0
    attention__head_count_kv: int | None = None
    attention__key_length: int | None = None
    attention__value_length: int | None = None
    attention__layer_norm_rms_epsilon: float | None = None
    attention__layer_norm_epsilon: float | None = None
    attention__clamp_kqv: float | None = None
    attention__sliding_window: int | None = None
    attention__scale: float | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    rope__dimension_count: int | None = None
    rope__freq_base: float = 10_000.0
    rope__scaling__type: str = "none"
    rope__scaling__factor: float | None = None
    rope__scaling__original_context_length: int | None = None
    rope__scaling__attn_factor: float | None = None
    rope__scaling__yarn_attn_factor: float | None = None
    rope__scaling__yarn_ext_factor: float | None = None
    rope__scaling__yarn_beta_fast: float | None = None
    rope__scaling__yarn_beta_slow: float | None = None
    expert_count: int = 0
    expert_used_count: int = 0
    expert_feed_forward_length: int | None = None
    expert_shared_count: int | None = None
    expert_gating_func: int | None = None
    expert_weights_norm: bool | None = None
    expert_weights_scale: float | None = None
    expert_group_count: int | None = None
    expert_group_used_count: int | None = None
    leading_dense_block_count: int | None = None
    nextn_predict_layers: int | None = None

    @property
    def head_dim(self) -> int:
        """Elements of a query or key."""
        return self.attention__key_length or self.embedding_length // max(self.attention__head_count, 1)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        given = self.attention__head_count_kv
        return self.attention__head_count if given is None else given

    @property
    def layers(self) -> int:
        """Number of layers without prediction layers, which follow them."""
        return self.block_count - (self.nextn_predict_layers or 0)


class GgufFamily(NamedTuple):
    """A family, by its architecture in GGUF files.

    Attributes:
        forms: keys of `ARCHITECTURES`.
        config_json: the keys of config.json that say the same as the metadata.
        names: names of tensors that are not those of `NAMES`.
        fused: names of tensors that contain several, one after the other.
        interleaved: whether rows of queries and keys are in the order in which llama.cpp rotates them: neighbours.
        partial: whether a part of each head may be rotated.
        dense_first: whether the first layers may be dense.
        score: the number of the function that makes scores of the router's logits.
    """

    forms: tuple[str, ...]
    config_json: Callable[[GgufKeys], dict[str, Any]]
    names: Mapping[str, str] = MappingProxyType({})
    fused: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    interleaved: bool = False
    partial: bool = False
    dense_first: bool = False
    score: int = SOFTMAX


DENSE = MappingProxyType({"shared_gate": "ffn_gate", "shared_down": "ffn_down", "shared_up": "ffn_up"})
"""Names of the network of a dense layer, in families whose other layers have routed experts."""
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "lm_head": "output",
        "attention_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "q_bias": "attn_q",
        "k_bias": "attn_k",
        "v_bias": "attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "o": "attn_output",
        "ffn_norm": "ffn_norm",
        "router": "ffn_gate_inp",
        "router_bias": "exp_probs_b",
        "shared_gate": "ffn_gate_shexp",
        "shared_down": "ffn_down_shexp",
        "shared_up": "ffn_up_shexp",
        "gate": "ffn_gate",
        "down": "ffn_down",
        "up": "ffn_up",
    }
)
"""Names of tensors in GGUF files, without layer and ending, by the last part of their canonical names."""


def _llama_like(keys: GgufKeys) -> dict[str, Any]:
    """The keys common to the descendants of Llama."""
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
        "embedding_multiplier": keys.embedding_scale,
        "residual_multiplier": keys.residual_scale,
        "logits_scaling": keys.logit_scale,
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


GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily(("mixtral", "llama"), _llama, interleaved=True),
        "qwen3moe": GgufFamily(("qwen3_moe",), _qwen3_moe),
        "olmoe": GgufFamily(("olmoe",), _olmoe),
        "granitemoe": GgufFamily(("granite_moe",), _granite_moe, interleaved=True),
        "minimax-m2": GgufFamily(("minimax_m2",), _minimax_m2, partial=True, score=SIGMOID),
        "glm4moe": GgufFamily(
            ("glm4_moe",),
            _glm4_moe,
            names={"ffn_norm": "post_attention_norm"},
            partial=True,
            dense_first=True,
            score=SIGMOID,
        ),
        "dbrx": GgufFamily(
            ("dbrx",), _dbrx, names={"ffn_norm": "attn_output_norm"}, fused={"attn_qkv": ("q", "k", "v")}
        ),
    }
)
"""Families that run, by `general.architecture`."""


def architecture_of(config: ModelConfig) -> str:
    """The architecture of a model in GGUF files.

    Raises:
        BadInput: it has none here.
    """
    found = next((name for name, each in GGUF_FAMILIES.items() if config.form in each.forms), None)
    if found is None:
        raise BadInput(
            f"{config.name}: GGUF files of the family {config.form} are not written: name a folder"
        )
    return found


def gguf_keys(config: ModelConfig) -> GgufKeys:
    """The metadata that describe a model.

    Raises:
        BadInput: its layers differ in more than the formats of their weights, or no key describes its rotation.
    """
    dense = _dense_layers(config)
    if len({(layer.attention, layer.feed_forward) for layer in config.pattern[dense:]}) > 1:
        raise BadInput(
            f"{config.name} has layers that differ, which no GGUF file describes: use layers that are alike"
        )
    attention, network, router = config.attention, config.routed, config.routed.router
    by_mean = config.norm == "layer"
    return GgufKeys(
        vocab_size=config.vocabulary,
        block_count=config.layers,
        context_length=config.max_positions,
        embedding_length=config.hidden,
        feed_forward_length=config.layer(0).feed_forward.shared if dense else network.intermediate,
        attention__head_count=attention.heads,
        attention__head_count_kv=attention.kv_heads,
        attention__key_length=attention.head_dim,
        attention__value_length=attention.head_dim,
        attention__layer_norm_rms_epsilon=None if by_mean else config.norm_eps,
        attention__layer_norm_epsilon=config.norm_eps if by_mean else None,
        attention__clamp_kqv=attention.clip,
        attention__sliding_window=attention.window,
        attention__scale=attention.scale,
        embedding_scale=_unless_one(config.embedding_factor),
        residual_scale=_unless_one(config.residual_factor),
        logit_scale=_unless_one(1 / config.logits_factor),
        rope__dimension_count=attention.rotary.turning(attention.head_dim),
        rope__freq_base=attention.rotary.theta,
        **_scaling(config),
        expert_count=network.experts if network.experts > 1 else 0,
        expert_used_count=network.top_k if network.experts > 1 else 0,
        expert_feed_forward_length=network.intermediate,
        expert_shared_count=network.shared // network.intermediate or None,
        expert_gating_func=SIGMOID if router.score == "sigmoid" else None,
        expert_weights_norm=router.normalised if network.shared else None,
        expert_weights_scale=router.scale if network.shared else None,
        expert_group_count=router.groups if router.groups > 1 else None,
        expert_group_used_count=router.kept_groups if router.groups > 1 else None,
        leading_dense_block_count=dense or None,
    )


def _dense_layers(config: ModelConfig) -> int:
    """Number of dense first layers that are alike, of a family that may have some."""
    family, first = GGUF_FAMILIES[architecture_of(config)], config.layer(0)
    if not family.dense_first or first.feed_forward.experts:
        return 0
    return sum(1 for _ in takewhile(lambda layer: layer == first, config.pattern))


def _scaling(config: ModelConfig) -> dict[str, Any]:
    scaling = config.attention.rotary.scaling
    if scaling is None:
        return {}
    kind = scaling.__struct_config__.tag
    keys = {"rope__scaling__type": kind, "rope__scaling__factor": scaling.factor}
    if isinstance(scaling, Yarn):
        keys |= {
            "rope__scaling__original_context_length": scaling.original_max_position_embeddings,
            "rope__scaling__yarn_beta_fast": scaling.beta_fast,
            "rope__scaling__yarn_beta_slow": scaling.beta_slow,
        }
    elif not isinstance(scaling, Linear):
        raise BadInput(
            f"{config.name}: GGUF files with a rotation scaled by {kind} are not written: name a folder"
        )
    return keys


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


def gguf_tensors(family: GgufFamily, config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of a model's files; those of a layer's experts are stacked."""
    common = {**NAMES, **family.names}
    for name in global_shapes(config):
        yield Stored(f"{common[name]}.weight", [name])
    for layer in range(config.layers):
        experts = range(config.layer(layer).feed_forward.experts)
        names = common if experts else common | DENSE
        theirs, ours = f"blk.{layer}.", f"layers.{layer}."
        parts = [name.removeprefix(ours) for name in dense_shapes(config, layer)]
        for name, fused in family.fused.items():
            yield Stored(f"{theirs}{name}.weight", [ours + part for part in fused])
            parts = [part for part in parts if part not in fused]
        for part in parts:
            ending = "bias" if part.endswith("_bias") else "weight"
            yield Stored(f"{theirs}{names[part]}.{ending}", [ours + part])
        for part in ("gate", "down", "up") if experts else ():
            stacked = [f"{ours}experts.{expert}.{part}" for expert in experts]
            if len(experts) == 1:
                yield Stored(f"{theirs}{names[part]}.weight", stacked)
            else:
                yield Stored(f"{theirs}{names[part]}_exps.weight", stacked, stacks=len(experts))


def single_expert_tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors that files of early 2024 have instead of stacked ones: one for each matrix of each expert."""
    for layer in range(config.layers):
        for expert in range(config.layer(layer).feed_forward.experts):
            for name in expert_shapes(config, layer, expert):
                part = NAMES[name.rpartition(".")[2]]
                yield Stored(f"blk.{layer}.{part}.{expert}.weight", [name])
