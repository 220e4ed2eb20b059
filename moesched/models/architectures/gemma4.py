"""Gemma 4 with experts: five layers with a window before each one without; a dense network beside the experts."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.models.architectures.simulated import Family, SimulatedKeys
from moesched.models.config import ModelConfig
from moesched.models.layers import FeedForward, GroupedAttention, Layer


class Gemma4Keys(SimulatedKeys, kw_only=True):
    """Keys of config.json; the defaults are those of Gemma-4-26B-A4B."""

    vocab_size: int = 262144
    hidden_size: int = 2816
    num_hidden_layers: int = 30
    max_position_embeddings: int = 262144
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 256
    num_global_key_value_heads: int | None = 2
    global_head_dim: int = 512
    attention_k_eq_v: bool = True
    sliding_window: int = 1024
    layer_types: tuple[str, ...] = ()
    intermediate_size: int = 2112
    moe_intermediate_size: int = 704
    num_experts: int = 128
    top_k_experts: int = 8


NORMS = 7
"""Norms of a layer: around attention, around the dense network, around the experts, and after their sum."""
VISION_WEIGHTS = 550_000_000
"""Weights of the picture encoder, as the model card rounds them."""


def _pattern(keys: Gemma4Keys) -> Iterator[Layer]:
    network = FeedForward(
        experts=keys.num_experts,
        top_k=keys.top_k_experts,
        intermediate=keys.moe_intermediate_size,
        shared=keys.intermediate_size,
        router_bias=True,
    )
    near = GroupedAttention(
        heads=keys.num_attention_heads,
        kv_heads=keys.num_key_value_heads,
        head_dim=keys.head_dim,
        window=keys.sliding_window,
        rolling=True,
        norm="head",
    )
    far = GroupedAttention(
        heads=keys.num_attention_heads,
        kv_heads=keys.num_global_key_value_heads or keys.num_key_value_heads,
        head_dim=keys.global_head_dim,
        norm="head",
        keys_are_values=keys.attention_k_eq_v,
    )
    for number in range(keys.num_hidden_layers):
        types = keys.layer_types
        is_far = types[number] == "full_attention" if types else number % 6 == 5
        yield Layer(attention=far if is_far else near, feed_forward=network, norms=NORMS)


def _unused(config: ModelConfig, keys: Gemma4Keys) -> int:
    return VISION_WEIGHTS


FAMILY = Family("gemma4", Gemma4Keys, _pattern, _unused)

GEMMA4 = FAMILY.architecture(
    ["gemma4", "gemma4_text"],
    [FAMILY.model("gemma-4-26b-a4b", Gemma4Keys())],
    ["huggingface.co/google/gemma-4-26B-A4B-it"],
)
