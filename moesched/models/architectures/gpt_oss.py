"""gpt-oss: every other layer attends to a window, heads have attention sinks, expert activations are clipped.

Attention, router and experts have biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from msgspec.structs import replace

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, Stored, known_model
from moesched.models.architectures.llama_like import FULL, SLIDING, LlamaLikeKeys
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.networks import Activation, FeedForward

ALPHA, LIMIT = 1.702, 7.0
STOP = 200002
"""The token that ends the text of the published models."""
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary embedding of a config.json that has none."""


class GptOssKeys(LlamaLikeKeys, kw_only=True):
    """The keys of a gpt-oss's config.json that are read, with their defaults."""

    aliases = (("num_experts", "num_local_experts"),)

    vocab_size: int = 201088
    hidden_size: int = 2880
    num_hidden_layers: int = 36
    max_position_embeddings: int = 131072
    eos_token_id: int | list[int] | None = None
    intermediate_size: int = 2880
    num_attention_heads: int = 64
    head_dim: int | None = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    sliding_window: int | None = 128
    swiglu_alpha: float = ALPHA
    swiglu_limit: float = LIMIT
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = True


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(GptOssKeys)
    file.require_layers(keys.num_hidden_layers)
    if keys.rope_parameters is None and not keys.rope_scaling:
        keys = replace(keys, rope_parameters=YARN)
    network = FeedForward(
        experts=keys.num_local_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.intermediate_size,
        biases=True,
        alternating=True,
        transposed_down=True,
        activation=Activation(alpha=keys.swiglu_alpha, limit=keys.swiglu_limit),
    )
    biases = "qkvo" if keys.attention_bias else ""
    layer_types = keys.layer_types or [*islice(cycle((SLIDING, FULL)), keys.num_hidden_layers)]
    layers = (
        llama_like.layer(file, keys, network, window=window, biases=biases, sinks=True)
        for window in llama_like.windows(file, keys, layer_types, keys.sliding_window)
    )
    return llama_like.build(file, replace(keys, attention_bias=False), "gpt_oss", *layers)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    attention, routed = config.attention, config.routed
    windows = [layer.grouped.window for layer in config.pattern]
    # Without this key, config.json means YaRN.
    rotation = {} if attention.rotary.scaling else {"rope_scaling": {"rope_type": "default"}}
    return (
        rotation
        | llama_like.config_json(config)
        | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": bool(attention.biases),
            "head_dim": attention.head_dim,
            "intermediate_size": routed.intermediate,
            "layer_types": [FULL if window is None else SLIDING for window in windows],
            "num_experts_per_tok": routed.top_k,
            "num_local_experts": routed.experts,
            "sliding_window": next((window for window in windows if window is not None), None),
            "swiglu_alpha": routed.activation.alpha,
            "swiglu_limit": routed.activation.limit,
        }
    )


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of 16-bit checkpoints; all experts of a layer have one tensor for each kind of matrix."""
    yield from llama_like.global_tensors(config)
    for layer, described in enumerate(config.pattern):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        yield from llama_like.attention_tensors(config, layer)
        yield Stored(theirs + "self_attn.sinks", [ours + "sinks"])
        yield Stored(theirs + "mlp.router.weight", [ours + "router"])
        yield Stored(theirs + "mlp.router.bias", [ours + "router_bias"])
        experts = range(described.feed_forward.experts)
        for name in described.feed_forward.expert_shapes(config.hidden):
            stored = name.replace("gate_up", "gate_up_proj").replace("down", "down_proj")
            parts = [f"{ours}experts.{expert}.{name}" for expert in experts]
            yield Stored(f"{theirs}mlp.experts.{stored}", parts, stacks=len(experts))


def _model(name: str, **keys: Any) -> ModelConfig:
    config = known_model(read, name, eos_token_id=STOP, **keys)
    return replace(config, format="mxfp4", expert_format="mxfp4")


GPT_OSS = Architecture(
    model_types=("gpt_oss",),
    shapes=(_model("gpt-oss-20b", num_hidden_layers=24, num_local_experts=32), _model("gpt-oss-120b")),
    sources={
        "gpt-oss-20b": "huggingface.co/openai/gpt-oss-20b",
        "gpt-oss-120b": "huggingface.co/openai/gpt-oss-120b",
    },
    read=read,
    formats=("mxfp4", "q8_0", "bf16"),
    left_out=("embedding",),
    config_json=config_json,
    tensors=tensors,
    extra_tensors=llama_like.extra_tensors,
)
