"""gpt-oss: every other layer attends to a window, all have attention sinks, experts are stored in 4 bits."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.models.architectures.simulated import Family, SimulatedKeys
from moesched.models.layers import FeedForward, GroupedAttention, Layer


class GptOssKeys(SimulatedKeys, kw_only=True):
    """Keys of config.json."""

    vocab_size: int = 201088
    hidden_size: int = 2880
    num_hidden_layers: int = 36
    max_position_embeddings: int = 131072
    eos_token_id: int | list[int] | None = 200002
    intermediate_size: int = 2880
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    sliding_window: int = 128
    layer_types: tuple[str, ...] = ()


def _pattern(keys: GptOssKeys) -> Iterator[Layer]:
    network = FeedForward(
        experts=keys.num_local_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.intermediate_size,
        biases=True,
    )
    types = keys.layer_types or ("sliding_attention", "full_attention") * keys.num_hidden_layers
    for number in range(keys.num_hidden_layers):
        attention = GroupedAttention(
            heads=keys.num_attention_heads,
            kv_heads=keys.num_key_value_heads,
            head_dim=keys.head_dim,
            window=keys.sliding_window if types[number] == "sliding_attention" else None,
            rolling=types[number] == "sliding_attention",
            biases="qkvo",
            sinks=True,
        )
        yield Layer(attention=attention, feed_forward=network)


FAMILY = Family("gpt_oss", GptOssKeys, _pattern, expert_format="mxfp4")

GPT_OSS = FAMILY.architecture(
    ["gpt_oss"],
    [
        FAMILY.model("gpt-oss-20b", GptOssKeys(num_hidden_layers=24, num_local_experts=32), "mxfp4"),
        FAMILY.model("gpt-oss-120b", GptOssKeys(), "mxfp4"),
    ],
    ["huggingface.co/openai/gpt-oss-20b", "huggingface.co/openai/gpt-oss-120b"],
    left_out=["embedding"],
    formats=["mxfp4", "q8_0", "bf16"],
)
