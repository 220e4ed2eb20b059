"""Llama 4: one large expert per token beside a shared one; three of four layers attend to chunks of the context."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.models.architectures.simulated import Family, SimulatedKeys
from moesched.models.config import ModelConfig
from moesched.models.layers import FeedForward, GroupedAttention, Layer


class Llama4Keys(SimulatedKeys, kw_only=True):
    """Keys of config.json; the defaults are those of Llama-4-Scout."""

    vocab_size: int = 202048
    hidden_size: int = 5120
    num_hidden_layers: int = 48
    max_position_embeddings: int = 10485760
    eos_token_id: int | list[int] | None = 200008
    num_attention_heads: int = 40
    num_key_value_heads: int = 8
    head_dim: int = 128
    attention_chunk_size: int = 8192
    no_rope_layer_interval: int = 4
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_local_experts: int = 16
    num_experts_per_tok: int = 1
    interleave_moe_layer_step: int = 1


VISION_WEIGHTS = 870_000_000
"""Weights of the picture encoder and its projection: 34 layers of 1408, as far as is known."""


def _pattern(keys: Llama4Keys) -> Iterator[Layer]:
    dense = FeedForward(shared=keys.intermediate_size_mlp)
    routed = FeedForward(
        experts=keys.num_local_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.intermediate_size,
        shared=keys.intermediate_size,
    )
    for number in range(1, keys.num_hidden_layers + 1):
        is_far = number % keys.no_rope_layer_interval == 0
        attention = GroupedAttention(
            heads=keys.num_attention_heads,
            kv_heads=keys.num_key_value_heads,
            head_dim=keys.head_dim,
            window=None if is_far else keys.attention_chunk_size,
            rolling=not is_far,
        )
        has_experts = number % keys.interleave_moe_layer_step == 0
        yield Layer(attention=attention, feed_forward=routed if has_experts else dense)


def _unused(config: ModelConfig, keys: Llama4Keys) -> int:
    return VISION_WEIGHTS


FAMILY = Family("llama4", Llama4Keys, _pattern, _unused)

LLAMA4 = FAMILY.architecture(
    ["llama4", "llama4_text"],
    [
        FAMILY.model("llama-4-scout", Llama4Keys()),
        FAMILY.model(
            "llama-4-maverick",
            Llama4Keys(num_local_experts=128, interleave_moe_layer_step=2, max_position_embeddings=1048576),
        ),
    ],
    [
        "huggingface.co/meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "huggingface.co/meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    ],
)
