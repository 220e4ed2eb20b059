"""MiniMax-M2: many small experts without a shared one, queries and keys normalised over all heads."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.models.architectures.simulated import Family, SimulatedKeys
from moesched.models.layers import FeedForward, GroupedAttention, Layer


class MiniMaxM2Keys(SimulatedKeys, kw_only=True):
    """The keys of config.json."""

    vocab_size: int = 200064
    hidden_size: int = 3072
    num_hidden_layers: int = 62
    max_position_embeddings: int = 196608
    eos_token_id: int | list[int] | None = 200020
    intermediate_size: int = 1536
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    use_qk_norm: bool = True
    use_routing_bias: bool = True
    num_local_experts: int = 256
    num_experts_per_tok: int = 8


def _pattern(keys: MiniMaxM2Keys) -> Iterator[Layer]:
    attention = GroupedAttention(
        heads=keys.num_attention_heads,
        kv_heads=keys.num_key_value_heads,
        head_dim=keys.head_dim,
        qk_norm="projection" if keys.use_qk_norm else None,
    )
    network = FeedForward(
        experts=keys.num_local_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.intermediate_size,
        router_bias=keys.use_routing_bias,
    )
    for _ in range(keys.num_hidden_layers):
        yield Layer(attention=attention, feed_forward=network)


FAMILY = Family("minimax_m2", {"minimax_m2": MiniMaxM2Keys}, _pattern)

MINIMAX_M2 = FAMILY.architecture(
    [FAMILY.model("minimax-m2", MiniMaxM2Keys(), "fp8")],
    ["huggingface.co/MiniMaxAI/MiniMax-M2"],
    left_out=["embedding"],
)
