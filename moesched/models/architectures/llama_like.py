"""Keys of config.json and names of tensors that architectures derived from Llama have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from moesched.models.architectures.architecture import Stored
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile, Keys
from moesched.models.layers import GroupedAttention, Layer
from moesched.models.networks import FeedForward
from moesched.models.rotary_keys import read_rotary, rotary_json

FULL, SLIDING = "full_attention", "sliding_attention"


class LlamaLikeKeys(Keys, kw_only=True):
    """The keys of config.json that are read for architectures derived from Llama, with their defaults.

    Attributes:
        num_key_value_heads: None for as many as `num_attention_heads`.
        head_dim: None for `hidden_size` over `num_attention_heads`.
    """

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 131072


def layer(
    file: ConfigFile,
    keys: LlamaLikeKeys,
    feed_forward: FeedForward,
    *,
    partial: bool = False,
    **attention: Any,
) -> Layer:
    """Return the layer with grouped attention that the keys of config.json describe.

    Args:
        file: the file, for error messages.
        keys: the decoded keys of config.json.
        feed_forward: the layer's feed-forward network.
        partial: whether the architecture may rotate only a part of each head.
        attention: further fields of `GroupedAttention`.
    """
    heads = keys.num_attention_heads
    head_dim = keys.hidden_size // max(heads, 1) if keys.head_dim is None else keys.head_dim
    return Layer(
        attention=GroupedAttention(
            heads=heads,
            kv_heads=heads if keys.num_key_value_heads is None else keys.num_key_value_heads,
            head_dim=head_dim,
            rotary=read_rotary(
                file, keys, head_dim=head_dim, max_positions=keys.max_position_embeddings, partial=partial
            ),
            **attention,
        ),
        feed_forward=feed_forward,
    )


def windows(
    file: ConfigFile, keys: LlamaLikeKeys, layer_types: Sequence[str], window: int | None
) -> Iterator[int | None]:
    """Yield the attention window in tokens of each layer; None for a layer with full attention.

    Args:
        layer_types: for each layer "sliding_attention" or "full_attention".
        window: window of the layers with sliding attention.
    """
    if len(layer_types) != keys.num_hidden_layers:
        what = f"layer_types has {len(layer_types):,} entries"
        raise file.impossible(what, f"num_hidden_layers is {keys.num_hidden_layers:,}")
    for kind in layer_types:
        file.require("layer_types", kind, FULL, SLIDING)
        yield window if kind == SLIDING else None


def build(file: ConfigFile, keys: LlamaLikeKeys, form: str, *kinds: Layer) -> ModelConfig:
    """Return the ModelConfig that the keys of config.json describe.

    Args:
        form: key of the architecture in `ARCHITECTURES`.
        kinds: the first layers; the model repeats them in this order up to its number of layers.
    """
    return file.build(
        keys,
        keys.num_hidden_layers,
        kinds,
        hidden=keys.hidden_size,
        norm_eps=keys.rms_norm_eps,
        max_positions=keys.max_position_embeddings,
        form=form,
    )


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that architectures derived from Llama share, without keys about experts."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.attention.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.attention.kv_heads,
        "rms_norm_eps": config.norm_eps,
    } | rotary_json(config.attention.rotary)


# ---------------------------------------------------------------- tensors


class ExpertNames(NamedTuple):
    """Names that files give to a layer's MoE block, and to the matrices of an expert."""

    block: str
    gate: str
    down: str
    up: str


MLP_EXPERTS = ExpertNames("mlp", gate="gate_proj", down="down_proj", up="up_proj")
BLOCK_SPARSE_EXPERTS = ExpertNames("block_sparse_moe", gate="w1", down="w2", up="w3")


def tensors(config: ModelConfig, names: ExpertNames) -> Iterator[Stored]:
    """Yield the tensors of a published checkpoint in which each matrix of each expert is a tensor of its own."""
    yield from global_tensors(config)
    for layer in range(config.layers):
        block, ours = f"model.layers.{layer}.{names.block}.", f"layers.{layer}."
        yield from attention_tensors(config, layer)
        if config.layer(layer).feed_forward.experts:
            yield Stored(block + "gate.weight", [ours + "router"])
        for expert in range(config.layer(layer).feed_forward.experts):
            for part, name in (("gate", names.gate), ("down", names.down), ("up", names.up)):
                yield Stored(f"{block}experts.{expert}.{name}.weight", [f"{ours}experts.{expert}.{part}"])


def fused_tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield tensors for routers and experts in the form that Hugging Face's transformers has in memory.

    A layer's experts are two tensors: one has the gate and up matrices of all experts, the other the down matrices.
    """
    for layer, described in enumerate(config.pattern):
        if not described.feed_forward.experts:
            continue
        block, ours = f"model.layers.{layer}.mlp.", f"layers.{layer}."
        experts = [f"{ours}experts.{expert}." for expert in range(described.feed_forward.experts)]
        gate_up = [expert + part for expert in experts for part in ("gate", "up")]
        yield Stored(block + "gate.weight", [ours + "router"])
        yield Stored(block + "experts.gate_up_proj", gate_up, stacks=len(experts))
        yield Stored(block + "experts.down_proj", [expert + "down" for expert in experts], len(experts))


def extra_tensors(config: ModelConfig) -> Iterator[str]:
    """Yield name patterns of tensors that are not needed: rotary frequencies, which are computed instead."""
    yield "model.layers.*.self_attn.rotary_emb.inv_freq"


def global_tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors outside the layers: embedding, final norm, and LM head unless it is tied to the embedding."""
    yield Stored("model.embed_tokens.weight", ["embedding"])
    yield Stored("model.norm.weight", ["final_norm"])
    if not config.tied_embeddings:
        yield Stored("lm_head.weight", ["lm_head"])


def attention_tensors(config: ModelConfig, layer: int) -> Iterator[Stored]:
    """Yield the tensors of a layer's attention, and of the norms before and after it."""
    theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
    yield Stored(theirs + "input_layernorm.weight", [ours + "attention_norm"])
    attention = config.layer(layer).grouped
    for part in "qkv":
        yield Stored(f"{theirs}self_attn.{part}_proj.weight", [ours + part])
    for part in attention.biases:
        yield Stored(f"{theirs}self_attn.{part}_proj.bias", [f"{ours}{part}_bias"])
    if attention.qk_norm:
        for part in ("q_norm", "k_norm"):
            yield Stored(f"{theirs}self_attn.{part}.weight", [ours + part])
    yield Stored(theirs + "self_attn.o_proj.weight", [ours + "o"])
    yield Stored(theirs + "post_attention_layernorm.weight", [ours + "ffn_norm"])
