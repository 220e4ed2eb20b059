"""Llama 4: each token uses one large expert and a shared one; three of four layers attend to chunks of the context."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from moesched.models.architectures.simulated import Family, SimulatedKeys
from moesched.models.config import ModelConfig
from moesched.models.layers import GroupedAttention, Layer
from moesched.models.networks import FeedForward


class Llama4Keys(SimulatedKeys, kw_only=True):
    """The keys of a Llama 4's config.json that are read, with their defaults."""

    kinds = ("chunked_attention", "full_attention")
    by_layer = ("layer_types", "no_rope_layers")

    vocab_size: int = 202048
    hidden_size: int = 5120
    num_hidden_layers: int = 48
    max_position_embeddings: int = 131072
    eos_token_id: int | list[int] | None = 2
    num_attention_heads: int = 40
    num_key_value_heads: int = 8
    head_dim: int = 128
    attention_bias: bool = False
    attention_chunk_size: int | None = 8192
    no_rope_layer_interval: int = 4
    no_rope_layers: tuple[int, ...] = ()
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_local_experts: int = 16
    num_experts_per_tok: int = 1
    interleave_moe_layer_step: int = 1
    moe_layers: tuple[int, ...] | None = None
    vision_config: dict[str, Any] | None = None

    @property
    def routed_layers(self) -> Collection[int]:
        """Numbers of the layers that have experts."""
        step = self.interleave_moe_layer_step
        return range(step - 1, self.num_hidden_layers, step) if self.moe_layers is None else self.moe_layers

    def is_far(self, layer: int) -> bool:
        """Test whether a layer attends to the whole context rather than to chunks.

        `layer_types` says so; without that key, layers without rotary embedding attend to the whole context.
        """
        rotates = (layer + 1) % self.no_rope_layer_interval
        if self.no_rope_layers:
            rotates = self.no_rope_layers[layer]
        return self.kind(layer, self.kinds[not rotates]) == "full_attention"


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
    routed_layers = frozenset(keys.routed_layers)
    for number in range(keys.num_hidden_layers):
        is_far = keys.is_far(number)
        attention = GroupedAttention(
            heads=keys.num_attention_heads,
            kv_heads=keys.num_key_value_heads,
            head_dim=keys.head_dim,
            window=None if is_far else keys.attention_chunk_size,
            biases="qkvo" if keys.attention_bias else "",
        )
        yield Layer(attention=attention, feed_forward=routed if number in routed_layers else dense)


def _unused(config: ModelConfig, keys: Llama4Keys) -> int:
    return 0 if keys.vision_config is None else VISION_WEIGHTS


def _published(name: str, **sizes: Any) -> ModelConfig:
    return FAMILY.model(name, Llama4Keys(eos_token_id=200008, vision_config={}, **sizes))


FAMILY = Family("llama4", {"llama4": Llama4Keys, "llama4_text": Llama4Keys}, _pattern, _unused)

LLAMA4 = FAMILY.architecture(
    [
        _published("llama-4-scout", max_position_embeddings=10485760),
        _published(
            "llama-4-maverick",
            num_local_experts=128,
            interleave_moe_layer_step=2,
            max_position_embeddings=1048576,
        ),
    ],
    [
        "huggingface.co/meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "huggingface.co/meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    ],
)
