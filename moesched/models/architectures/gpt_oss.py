"""gpt-oss: every other layer attends to a window, all have attention sinks, experts are stored in 4 bits."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.models.architectures.simulated import Family, SimulatedKeys
from moesched.models.layers import FeedForward, GroupedAttention, Layer

STOP = 200002
"""The token that ends the text of the published models."""


class GptOssKeys(SimulatedKeys, kw_only=True):
    """The keys of config.json."""

    kinds = ("sliding_attention", "full_attention")

    vocab_size: int = 201088
    hidden_size: int = 2880
    num_hidden_layers: int = 36
    max_position_embeddings: int = 131072
    eos_token_id: int | list[int] | None = None
    intermediate_size: int = 2880
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    sliding_window: int = 128
    attention_bias: bool = True


def _pattern(keys: GptOssKeys) -> Iterator[Layer]:
    network = FeedForward(
        experts=keys.num_local_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.intermediate_size,
        biases=True,
    )
    for number in range(keys.num_hidden_layers):
        is_near = keys.kind(number, keys.kinds[number % 2]) == "sliding_attention"
        attention = GroupedAttention(
            heads=keys.num_attention_heads,
            kv_heads=keys.num_key_value_heads,
            head_dim=keys.head_dim,
            window=keys.sliding_window if is_near else None,
            rolling=is_near,
            biases="qkvo" if keys.attention_bias else "",
            sinks=True,
        )
        yield Layer(attention=attention, feed_forward=network)


FAMILY = Family("gpt_oss", {"gpt_oss": GptOssKeys}, _pattern, expert_format="mxfp4")

GPT_OSS = FAMILY.architecture(
    [
        FAMILY.model(
            "gpt-oss-20b", GptOssKeys(num_hidden_layers=24, num_local_experts=32, eos_token_id=STOP), "mxfp4"
        ),
        FAMILY.model("gpt-oss-120b", GptOssKeys(eos_token_id=STOP), "mxfp4"),
    ],
    ["huggingface.co/openai/gpt-oss-20b", "huggingface.co/openai/gpt-oss-120b"],
    left_out=["embedding"],
    formats=["mxfp4", "q8_0", "bf16"],
)
