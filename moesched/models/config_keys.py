"""The keys of a Hugging Face config.json that matter, as files of each kind spell them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class ModelType(msgspec.Struct):
    """What says which keys the others are."""

    model_type: str | None = None


class Rope(msgspec.Struct):
    """The settings of the rotary embedding, in either spelling."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float | None = None


class Keys(msgspec.Struct):
    """The keys of Llama, Mistral and Mixtral; UNSET where a missing key and a null mean different things."""

    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | UnsetType | None = UNSET
    head_dim: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    vocab_size: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | UnsetType | None = UNSET
    layer_types: list[str] | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: int | list[int] | UnsetType | None = UNSET
    hidden_act: str | None = None
    clip_qkv: float | None = None
    moe_normalize_expert_weights: float | UnsetType | None = UNSET
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class GenerationKeys(msgspec.Struct):
    """generation_config.json, whose stop tokens go before those of config.json."""

    eos_token_id: int | list[int] | None = None


class DbrxAttention(msgspec.Struct):
    """DBRX's attn_config."""

    clip_qkv: float | None = None
    kv_n_heads: int | None = None
    rope_theta: float | None = None


class DbrxActivation(msgspec.Struct):
    """DBRX's ffn_config.ffn_act_fn."""

    name: str | None = None


class DbrxFeedForward(msgspec.Struct):
    """DBRX's ffn_config."""

    ffn_act_fn: DbrxActivation | None = None
    ffn_hidden_size: int | None = None
    moe_num_experts: int | None = None
    moe_top_k: int | None = None
    moe_normalize_expert_weights: float | UnsetType | None = UNSET


class DbrxKeys(msgspec.Struct):
    """The keys of DBRX, in part nested. rope_parameters is newer than the published file."""

    d_model: int | None = None
    n_heads: int | None = None
    n_layers: int | None = None
    max_seq_len: int | None = None
    vocab_size: int | None = None
    attn_config: DbrxAttention | None = None
    ffn_config: DbrxFeedForward | None = None
    rope_parameters: Rope | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: int | list[int] | UnsetType | None = UNSET
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    def common(self) -> Keys:
        """The same as the other models spell it."""
        attention = self.attn_config or DbrxAttention()
        feed_forward = self.ffn_config or DbrxFeedForward()
        return Keys(
            hidden_size=self.d_model,
            intermediate_size=feed_forward.ffn_hidden_size,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=UNSET if attention.kv_n_heads is None else attention.kv_n_heads,
            num_local_experts=feed_forward.moe_num_experts,
            num_experts_per_tok=feed_forward.moe_top_k,
            vocab_size=self.vocab_size,
            rope_theta=attention.rope_theta,
            rope_parameters=self.rope_parameters,
            max_position_embeddings=self.max_seq_len,
            tie_word_embeddings=self.tie_word_embeddings,
            eos_token_id=self.eos_token_id,
            hidden_act=feed_forward.ffn_act_fn.name if feed_forward.ffn_act_fn else None,
            clip_qkv=attention.clip_qkv,
            moe_normalize_expert_weights=feed_forward.moe_normalize_expert_weights,
            quantization_config=self.quantization_config,
            dtype=self.dtype,
            torch_dtype=self.torch_dtype,
        )
