"""DeepSeek-V2, V3 and R1, and Kimi-K2: latent attention, first layers without experts, shared experts.

Published files also have a multi-token prediction layer, which is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from moesched.models.architectures.simulated import Family, SimulatedKeys, prediction_layer
from moesched.models.config import ModelConfig
from moesched.models.layers import LatentAttention, Layer
from moesched.models.networks import FeedForward, Router


class DeepSeekKeys(SimulatedKeys, kw_only=True):
    """The keys of config.json that are read for DeepSeek-V3 and its descendants, with their defaults."""

    neutral = SimulatedKeys.neutral | {"attention_bias": (False,), "mlp_bias": (False,)}
    kinds = ("full_attention",)
    aliases: ClassVar[tuple[tuple[str, str], ...]] = (
        ("num_local_experts", "n_routed_experts"),
        ("num_mtp_layers", "num_nextn_predict_layers"),
    )

    vocab_size: int = 129280
    hidden_size: int = 7168
    num_hidden_layers: int = 61
    max_position_embeddings: int = 4096
    eos_token_id: int | list[int] | None = 1
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_attention_heads: int = 128
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 3
    num_nextn_predict_layers: int = 1
    topk_method: str = "noaux_tc"
    attention_bias: bool = False
    mlp_bias: bool = False


class DeepSeekV2Keys(DeepSeekKeys, kw_only=True):
    """The keys of config.json that are read for DeepSeek-V2, with their defaults."""

    aliases = (("num_experts", "n_routed_experts"),)

    vocab_size: int = 102400
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    max_position_embeddings: int = 2048
    eos_token_id: int | list[int] | None = 2
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_attention_heads: int = 32
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    first_k_dense_replace: int = 0
    num_nextn_predict_layers: int = 0
    topk_method: str = "greedy"


def _pattern(keys: DeepSeekKeys) -> Iterator[Layer]:
    attention = LatentAttention(
        heads=keys.num_attention_heads,
        query_rank=keys.q_lora_rank,
        rank=keys.kv_lora_rank,
        plain=keys.qk_nope_head_dim,
        rotary=keys.qk_rope_head_dim,
        value=keys.v_head_dim,
    )
    dense = FeedForward(shared=keys.intermediate_size)
    routed = FeedForward(
        experts=keys.n_routed_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.moe_intermediate_size,
        shared=keys.n_shared_experts * keys.moe_intermediate_size,
        router=Router(corrected=keys.topk_method == "noaux_tc"),
    )
    for number in range(keys.num_hidden_layers):
        network = dense if number < keys.first_k_dense_replace else routed
        yield Layer(attention=attention, feed_forward=network)


def _unused(config: ModelConfig, keys: DeepSeekKeys) -> int:
    return keys.num_nextn_predict_layers * prediction_layer(config, copies=2)


def _v3(name: str, **sizes: Any) -> ModelConfig:
    return FAMILY.model(name, DeepSeekKeys(**({"max_position_embeddings": 163840} | sizes)), "fp8")


FAMILY = Family(
    "deepseek",
    {"deepseek_v2": DeepSeekV2Keys, "deepseek_v3": DeepSeekKeys, "kimi_k2": DeepSeekKeys},
    _pattern,
    _unused,
)

DEEPSEEK = FAMILY.architecture(
    [
        FAMILY.model(
            "deepseek-v2-lite",
            DeepSeekV2Keys(
                hidden_size=2048,
                num_hidden_layers=27,
                max_position_embeddings=163840,
                eos_token_id=100001,
                intermediate_size=10944,
                moe_intermediate_size=1408,
                num_attention_heads=16,
                q_lora_rank=None,
                num_experts_per_tok=6,
                first_k_dense_replace=1,
            ),
        ),
        _v3("deepseek-v3"),
        _v3("deepseek-r1"),
        _v3(
            "kimi-k2",
            vocab_size=163840,
            max_position_embeddings=131072,
            eos_token_id=163585,
            num_attention_heads=64,
            n_routed_experts=384,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
        ),
    ],
    [
        "huggingface.co/deepseek-ai/DeepSeek-V2-Lite",
        "huggingface.co/deepseek-ai/DeepSeek-V3",
        "huggingface.co/deepseek-ai/DeepSeek-R1",
        "huggingface.co/moonshotai/Kimi-K2-Instruct",
    ],
    left_out=["embedding"],
)
