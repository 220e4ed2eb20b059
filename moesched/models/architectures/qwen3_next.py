"""Qwen3-Next, and the Qwen3.5 and 3.6 MoE models: three layers of linear attention before each one of gated attention.

Published files also have a multi-token prediction layer, and the files of Qwen3.5 and 3.6 a vision encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moesched.models.architectures.simulated import Family, SimulatedKeys, prediction_layer
from moesched.models.config import ModelConfig
from moesched.models.layers import GroupedAttention, Layer, LinearAttention
from moesched.models.networks import FeedForward


class Qwen3NextKeys(SimulatedKeys, kw_only=True):
    """The keys of config.json that are read for Qwen3-Next, with their defaults."""

    neutral = SimulatedKeys.neutral | {"decoder_sparse_step": (1,), "mlp_only_layers": ((),)}
    kinds = ("linear_attention", "full_attention")

    vocab_size: int = 151936
    hidden_size: int = 2048
    num_hidden_layers: int = 48
    max_position_embeddings: int = 32768
    eos_token_id: int | list[int] | None = None
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    full_attention_interval: int = 4
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    attention_bias: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    vision_config: dict[str, Any] | None = None


class Qwen35MoeKeys(Qwen3NextKeys, kw_only=True):
    """The keys of config.json that are read for Qwen3.5 and 3.6 MoE models, with their defaults."""

    vocab_size: int = 248320
    num_hidden_layers: int = 40
    num_experts: int = 256
    num_experts_per_tok: int = 8


VISION_WEIGHTS = 446_570_352
"""Weights of the picture encoder of Qwen3.5-35B-A3B: 27 layers of 1152, as in Qwen3-VL."""


def _pattern(keys: Qwen3NextKeys) -> Iterator[Layer]:
    network = FeedForward(
        experts=keys.num_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.moe_intermediate_size,
        shared=keys.shared_expert_intermediate_size,
        weighted=True,
    )
    full = GroupedAttention(
        heads=keys.num_attention_heads,
        kv_heads=keys.num_key_value_heads,
        head_dim=keys.head_dim,
        qk_norm="head",
        gated=True,
        biases="qkvo" if keys.attention_bias else "",
    )
    linear = LinearAttention(
        key_heads=keys.linear_num_key_heads,
        value_heads=keys.linear_num_value_heads,
        key=keys.linear_key_head_dim,
        value=keys.linear_value_head_dim,
        convolution=keys.linear_conv_kernel_dim,
    )
    for number in range(keys.num_hidden_layers):
        usual = keys.kinds[(number + 1) % keys.full_attention_interval == 0]
        is_full = keys.kind(number, usual) == "full_attention"
        yield Layer(attention=full if is_full else linear, feed_forward=network)


def _unused(config: ModelConfig, keys: Qwen3NextKeys) -> int:
    return prediction_layer(config, copies=0) + (0 if keys.vision_config is None else VISION_WEIGHTS)


NEXT = Family("qwen3_next", {"qwen3_next": Qwen3NextKeys}, _pattern, _unused)
WITH_VISION = Family(
    "qwen3_5_moe", {"qwen3_5_moe": Qwen35MoeKeys, "qwen3_5_moe_text": Qwen35MoeKeys}, _pattern, _unused
)
PUBLISHED: dict[str, Any] = {"max_position_embeddings": 262144, "eos_token_id": 151645}
"""Keys that the published models have in common."""

QWEN3_NEXT = NEXT.architecture(
    [NEXT.model("qwen3-next-80b-a3b", Qwen3NextKeys(**PUBLISHED))],
    ["huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct"],
    left_out=["embedding", "lm_head"],
)

_35B = Qwen35MoeKeys(**PUBLISHED, vision_config={})

QWEN3_5_MOE = WITH_VISION.architecture(
    [
        WITH_VISION.model("qwen3.5-35b-a3b", _35B),
        WITH_VISION.model("qwen3.6-35b-a3b", _35B),
    ],
    ["huggingface.co/Qwen/Qwen3.5-35B-A3B", "huggingface.co/Qwen/Qwen3.6-35B-A3B"],
    left_out=["embedding"],
)
