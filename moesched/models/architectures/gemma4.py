"""Gemma 4: five layers with sliding-window attention before each one with full attention.

Each layer has a dense network, and in some models experts in addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec.structs import replace

from moesched.models.architectures.simulated import Family, SimulatedKeys
from moesched.models.config import ModelConfig
from moesched.models.layers import GroupedAttention, Layer
from moesched.models.networks import FeedForward, Router

LayerNumber = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,5}$")]


class Heads(msgspec.Struct, forbid_unknown_fields=True):
    """Number of KV heads and width of a head in one layer; None for a value as in other layers of its kind."""

    num_key_value_heads: int | None = None
    head_dim: int | None = None

    def replace_in(self, attention: GroupedAttention) -> GroupedAttention:
        """Return a copy of a layer's attention with these values; where a value is None, the attention's own stays."""
        return replace(
            attention,
            kv_heads=attention.kv_heads if self.num_key_value_heads is None else self.num_key_value_heads,
            head_dim=attention.head_dim if self.head_dim is None else self.head_dim,
        )


class Gemma4Keys(SimulatedKeys, kw_only=True):
    """The keys of a Gemma 4's config.json that are read, with their defaults."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0,),
        "use_bidirectional_attention": (None, "vision"),
    }
    kinds = ("sliding_attention", "full_attention")

    vocab_size: int = 262144
    hidden_size: int = 2304
    num_hidden_layers: int = 30
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    num_global_key_value_heads: int | None = None
    global_head_dim: int = 512
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    sliding_window: int = 512
    intermediate_size: int = 9216
    enable_moe_block: bool = False
    moe_intermediate_size: int = 0
    num_experts: int = 0
    top_k_experts: int = 0
    hidden_size_per_layer_input: int = 256
    num_kv_shared_layers: int = 0
    use_bidirectional_attention: str | None = None
    per_layer_config: dict[LayerNumber, Heads] | None = None
    vision_config: dict[str, Any] | None = None


NORMS = 4
"""Norms of a layer: around attention, and around the dense network."""
EXPERT_NORMS = 4
"""Norms that experts add to a layer: around the experts, of the router's input, and after the sum."""
PERIOD = 6
"""Every sixth layer attends to the whole context, unless `layer_types` says otherwise."""
VISION_WEIGHTS = 550_000_000
"""Weights of the picture encoder, as the model card rounds them."""


def _pattern(keys: Gemma4Keys) -> Iterator[Layer]:
    network, norms = _network(keys)
    near = GroupedAttention(
        heads=keys.num_attention_heads,
        kv_heads=keys.num_key_value_heads,
        head_dim=keys.head_dim,
        window=keys.sliding_window,
        qk_norm="head",
        biases="qkvo" if keys.attention_bias else "",
    )
    far = _far(keys, near)
    heads = {int(layer): each for layer, each in (keys.per_layer_config or {}).items()}
    for number in range(keys.num_hidden_layers):
        usual = keys.kinds[(number + 1) % PERIOD == 0]
        attention = far if keys.kind(number, usual) == "full_attention" else near
        if number in heads:
            attention = heads[number].replace_in(attention)
        yield Layer(attention=attention, feed_forward=network, norms=norms)


def _network(keys: Gemma4Keys) -> tuple[FeedForward, int]:
    """Return the feed-forward network and the number of norms of each layer.

    A dense model is described as one with a single expert.
    """
    if not keys.enable_moe_block:
        return FeedForward(experts=1, top_k=1, intermediate=keys.intermediate_size), NORMS
    network = FeedForward(
        experts=keys.num_experts,
        top_k=keys.top_k_experts,
        intermediate=keys.moe_intermediate_size,
        shared=keys.intermediate_size,
        router=Router(corrected=True),
    )
    return network, NORMS + EXPERT_NORMS


def _far(keys: Gemma4Keys, near: GroupedAttention) -> GroupedAttention:
    """Return the attention of the layers without a window, given the attention `near` of the layers with one.

    In older files, keys such as `global_head_dim` give the number of its KV heads and the width of a head. Newer files
    list the heads of each layer in `per_layer_config`, which is not read here.
    """
    far = replace(near, window=None, keys_are_values=keys.attention_k_eq_v)
    if keys.per_layer_config is not None:
        return far
    kv_heads = keys.num_global_key_value_heads if keys.attention_k_eq_v else None
    return Heads(kv_heads, keys.global_head_dim).replace_in(far)


def _unused(config: ModelConfig, keys: Gemma4Keys) -> int:
    return 0 if keys.vision_config is None else VISION_WEIGHTS


FAMILY = Family("gemma4", {"gemma4": Gemma4Keys, "gemma4_text": Gemma4Keys}, _pattern, _unused)

_26B_A4B = Gemma4Keys(
    hidden_size=2816,
    max_position_embeddings=262144,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    sliding_window=1024,
    intermediate_size=2112,
    enable_moe_block=True,
    moe_intermediate_size=704,
    num_experts=128,
    top_k_experts=8,
    hidden_size_per_layer_input=0,
    vision_config={},
)

GEMMA4 = FAMILY.architecture(
    [FAMILY.model("gemma-4-26b-a4b", _26B_A4B)],
    ["huggingface.co/google/gemma-4-26B-A4B-it"],
)
