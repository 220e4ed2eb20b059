"""DBRX: queries, keys and values as one clipped matrix, layer norms with a mean, down matrices stored transposed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from moesched.models.architectures.architecture import Architecture, Stored, known_model
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile, Keys
from moesched.models.layers import GroupedAttention, Layer
from moesched.models.networks import FeedForward
from moesched.models.rotary import Rotary
from moesched.models.rotary_keys import read_rotary


class AttentionKeys(msgspec.Struct):
    """The keys of `attn_config` in config.json that are read, with their defaults."""

    clip_qkv: float | None = None
    kv_n_heads: int = 1
    rope_theta: float | None = None


class ActivationKeys(msgspec.Struct):
    """The keys of `ffn_config.ffn_act_fn` in config.json that are read, with their defaults."""

    name: str = "silu"


class FeedForwardKeys(msgspec.Struct):
    """The keys of `ffn_config` in config.json that are read, with their defaults."""

    ffn_act_fn: ActivationKeys = msgspec.field(default_factory=ActivationKeys)
    ffn_hidden_size: int = 3584
    moe_num_experts: int = 4
    moe_top_k: int = 1
    moe_normalize_expert_weights: float | None = 1.0


class DbrxKeys(Keys, kw_only=True):
    """The keys of a DBRX's config.json that are read, with their defaults.

    Published files have `rope_theta` in `attn_config`; files of newer tools also have `rope_parameters`.
    """

    aliases = (
        ("hidden_size", "d_model"),
        ("num_attention_heads", "n_heads"),
        ("num_hidden_layers", "n_layers"),
        ("max_position_embeddings", "max_seq_len"),
    )

    d_model: int = 2048
    n_heads: int = 16
    n_layers: int = 24
    max_seq_len: int = 2048
    attn_config: AttentionKeys = msgspec.field(default_factory=AttentionKeys)
    ffn_config: FeedForwardKeys = msgspec.field(default_factory=FeedForwardKeys)
    eos_token_id: int | list[int] | None = None


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(DbrxKeys)
    attention, feed_forward = keys.attn_config, keys.ffn_config
    file.require("hidden_act", feed_forward.ffn_act_fn.name, "silu", "swish")
    # Normalised weights equal a softmax over the chosen experts alone, which is what the kernel computes.
    file.require("moe_normalize_expert_weights", feed_forward.moe_normalize_expert_weights, 1.0)
    head_dim = keys.d_model // max(keys.n_heads, 1)
    layer = Layer(
        attention=GroupedAttention(
            heads=keys.n_heads,
            kv_heads=attention.kv_n_heads,
            head_dim=head_dim,
            rotary=_rotary(file, keys, head_dim),
            clip=attention.clip_qkv,
        ),
        feed_forward=FeedForward(
            experts=feed_forward.moe_num_experts,
            top_k=feed_forward.moe_top_k,
            intermediate=feed_forward.ffn_hidden_size,
            transposed_down=True,
        ),
    )
    return file.build(
        keys,
        keys.n_layers,
        [layer],
        hidden=keys.d_model,
        norm_eps=1e-5,
        max_positions=keys.max_seq_len,
        norm="layer",
        form="dbrx",
    )


def _rotary(file: ConfigFile, keys: DbrxKeys, head_dim: int) -> Rotary:
    published = keys.attn_config.rope_theta
    rotary = read_rotary(file, keys, head_dim=head_dim, max_positions=keys.max_seq_len, theta=published)
    if published not in (None, rotary.theta):
        what = f"rope_theta is {published:g} in attn_config and {rotary.theta:g} in rope_parameters"
        raise file.impossible(what, "they must agree")
    return rotary


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    # Published files have rope_theta only in attn_config, where transformers 5 no longer looks for it.
    return {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "attn_config": {
            "clip_qkv": config.attention.clip,
            "kv_n_heads": config.attention.kv_heads,
            "model_type": "",
            "rope_theta": config.attention.rotary.theta,
        },
        "d_model": config.hidden,
        "emb_pdrop": 0.0,
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": config.routed.intermediate,
            "model_type": "",
            "moe_jitter_eps": None,
            "moe_normalize_expert_weights": 1.0,
            "moe_num_experts": config.routed.experts,
            "moe_top_k": config.routed.top_k,
        },
        "max_seq_len": config.max_positions,
        "n_heads": config.attention.heads,
        "n_layers": config.layers,
        "output_router_logits": False,
        "resid_pdrop": 0.0,
        "rope_parameters": {"rope_theta": config.attention.rotary.theta, "rope_type": "default"},
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of published checkpoints.

    One tensor has a layer's q, k and v. Three more have the gate, up and down matrices of all its experts; down
    matrices are stored as (inputs, outputs).
    """
    yield Stored("transformer.wte.weight", ["embedding"])
    for layer in range(config.layers):
        block, ours = f"transformer.blocks.{layer}.", f"layers.{layer}."
        attention = block + "norm_attn_norm."
        yield Stored(attention + "norm_1.weight", [ours + "attention_norm"])
        yield Stored(attention + "attn.Wqkv.weight", [ours + part for part in "qkv"])
        yield Stored(attention + "attn.out_proj.weight", [ours + "o"])
        yield Stored(attention + "norm_2.weight", [ours + "ffn_norm"])
        yield Stored(block + "ffn.router.layer.weight", [ours + "router"])
        for name, part in (("w1", "gate"), ("v1", "up"), ("w2", "down")):
            experts = [
                f"{ours}experts.{expert}.{part}" for expert in range(config.layer(layer).feed_forward.experts)
            ]
            yield Stored(f"{block}ffn.experts.mlp.{name}", experts)
    yield Stored("transformer.norm_f.weight", ["final_norm"])
    if not config.tied_embeddings:
        yield Stored("lm_head.weight", ["lm_head"])


def extra_tensors(config: ModelConfig) -> Iterator[str]:
    """Yield name patterns of tensors that are not needed: rotary frequencies, which are computed instead."""
    yield "transformer.blocks.*.norm_attn_norm.attn.rotary_emb.inv_freq"


_DBRX = known_model(
    read,
    "dbrx",
    vocab_size=100352,
    d_model=6144,
    n_heads=48,
    n_layers=40,
    max_seq_len=32768,
    attn_config={"clip_qkv": 8.0, "kv_n_heads": 8, "rope_theta": 5e5},
    ffn_config={"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    eos_token_id=100257,
)

DBRX = Architecture(
    model_types=("dbrx",),
    shapes=(_DBRX,),
    sources={"dbrx": "huggingface.co/databricks/dbrx-base"},
    read=read,
    config_json=config_json,
    tensors=tensors,
    extra_tensors=extra_tensors,
)
