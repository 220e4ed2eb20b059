"""Mixtral: Mistral's attention, with experts weighted by a softmax over the logits of the chosen ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, known_model
from moesched.models.architectures.llama_like import BLOCK_SPARSE_EXPERTS, LlamaLikeKeys
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.networks import FeedForward


class MixtralKeys(LlamaLikeKeys, kw_only=True):
    """The keys of a Mixtral's config.json that are read, with their defaults."""

    aliases = (("num_experts", "num_local_experts"),)

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(MixtralKeys)
    network = FeedForward(
        experts=keys.num_local_experts, top_k=keys.num_experts_per_tok, intermediate=keys.intermediate_size
    )
    layer = llama_like.layer(file, keys, network, window=window(file, keys.sliding_window, keys.layer_types))
    return llama_like.build(file, keys, "mixtral", layer)


def window(file: ConfigFile, sliding_window: int | None, layer_types: Sequence[str]) -> int | None:
    """Return the attention window in tokens, which is the same for all layers; None if there is no window.

    Args:
        sliding_window: the window that config.json gives; None without one.
        layer_types: the kind of each layer; may be empty.

    Raises:
        BadInput: the layers are not all of one kind.
    """
    if len(set(layer_types)) > 1:
        raise file.unsupported("layer_types", sorted(set(layer_types)), "one kind of layer")
    return sliding_window


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    return llama_like.config_json(config) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": config.attention.head_dim,
        "intermediate_size": config.routed.intermediate,
        "num_experts_per_tok": config.routed.top_k,
        "num_local_experts": config.routed.experts,
        "output_router_logits": False,
        "sliding_window": config.attention.window,
    }


_8X7B = known_model(read, "mixtral-8x7b", max_position_embeddings=32768)
SHAPES = (
    _8X7B.varied(
        name="mixtral-0.8b",
        layers=8,
        hidden=1024,
        intermediate=3584,
        heads=16,
        kv_heads=4,
        head_dim=64,
    ),
    _8X7B,
    _8X7B.varied(
        name="mixtral-8x22b",
        layers=56,
        hidden=6144,
        intermediate=16384,
        heads=48,
        max_positions=65536,
    ),
)

MIXTRAL = Architecture(
    model_types=("mixtral",),
    shapes=SHAPES,
    sources={
        "mixtral-0.8b": "made for tests: Mixtral 8x7B with a quarter of its layers and sizes",
        "mixtral-8x7b": "huggingface.co/mistralai/Mixtral-8x7B-v0.1",
        "mixtral-8x22b": "huggingface.co/mistralai/Mixtral-8x22B-v0.1",
    },
    read=read,
    config_json=config_json,
    tensors=partial(llama_like.tensors, names=BLOCK_SPARSE_EXPERTS),
    other_tensors=llama_like.fused_tensors,
    extra_tensors=llama_like.extra_tensors,
)
