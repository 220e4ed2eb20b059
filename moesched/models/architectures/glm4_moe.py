"""GLM-4.5, GLM-4.5-Air and GLM-4.7: dense first layers, a shared expert, biased projections, a prediction layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moesched.models.architectures.simulated import Family, SimulatedKeys, prediction_layer
from moesched.models.config import ModelConfig
from moesched.models.layers import FeedForward, GroupedAttention, Layer

STOP = 151336
"""The token that ends the text of the published models."""


class Glm4MoeKeys(SimulatedKeys, kw_only=True):
    """The keys of config.json."""

    vocab_size: int = 151552
    hidden_size: int = 4096
    num_hidden_layers: int = 46
    max_position_embeddings: int = 131072
    eos_token_id: int | list[int] | None = None
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    head_dim: int = 128
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 1


def _pattern(keys: Glm4MoeKeys) -> Iterator[Layer]:
    attention = GroupedAttention(
        heads=keys.num_attention_heads,
        kv_heads=keys.num_key_value_heads,
        head_dim=keys.head_dim,
        qk_norm="head" if keys.use_qk_norm else None,
        biases="qkv" if keys.attention_bias else "",
    )
    dense = FeedForward(shared=keys.intermediate_size)
    routed = FeedForward(
        experts=keys.n_routed_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.moe_intermediate_size,
        shared=keys.n_shared_experts * keys.moe_intermediate_size,
        router_bias=True,
    )
    for number in range(keys.num_hidden_layers):
        network = dense if number < keys.first_k_dense_replace else routed
        yield Layer(attention=attention, feed_forward=network)


def _unused(config: ModelConfig, keys: Glm4MoeKeys) -> int:
    return keys.num_nextn_predict_layers * prediction_layer(config, copies=2)


FAMILY = Family("glm4_moe", {"glm4_moe": Glm4MoeKeys}, _pattern, _unused)


def _large(name: str, **sizes: Any) -> ModelConfig:
    keys = {
        "hidden_size": 5120,
        "num_hidden_layers": 92,
        "eos_token_id": STOP,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
    }
    return FAMILY.model(name, Glm4MoeKeys(**(keys | sizes)))


GLM4_MOE = FAMILY.architecture(
    [
        _large("glm-4.5"),
        FAMILY.model("glm-4.5-air", Glm4MoeKeys(eos_token_id=STOP, attention_bias=True)),
        _large("glm-4.7", max_position_embeddings=202752),
    ],
    [
        "huggingface.co/zai-org/GLM-4.5",
        "huggingface.co/zai-org/GLM-4.5-Air",
        "huggingface.co/zai-org/GLM-4.7",
    ],
    left_out=["embedding", "lm_head"],
)
