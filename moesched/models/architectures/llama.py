"""Llama, Mistral and Ministral: dense models, treated as models with a single expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, Stored
from moesched.models.architectures.llama_like import FULL, SLIDING, LlamaLikeKeys
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.networks import FeedForward


class LlamaKeys(LlamaLikeKeys, kw_only=True):
    """The keys of a Llama's config.json that are read, with their defaults."""

    intermediate_size: int = 11008
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048


class MistralKeys(LlamaLikeKeys, kw_only=True):
    """The keys of config.json that are read for a Mistral or a Ministral, whose layers may differ in their window."""

    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] = ()


def read(file: ConfigFile) -> ModelConfig:
    """Convert the config.json of a Llama, Mistral or Ministral."""
    if file.model_type == "llama":
        return _build(file, file.keys(LlamaKeys), None)
    keys = file.keys(MistralKeys)
    if not keys.layer_types:
        return _build(file, keys, keys.sliding_window)
    return _build(file, keys, *llama_like.windows(file, keys, keys.layer_types, keys.sliding_window))


def _build(file: ConfigFile, keys: LlamaLikeKeys, *windows: int | None) -> ModelConfig:
    network = FeedForward(experts=1, top_k=1, intermediate=keys.intermediate_size)
    layers = (llama_like.layer(file, keys, network, window=window) for window in windows)
    return llama_like.build(file, keys, "llama", *layers)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share.

    The keys are a Ministral's if layers differ in their window, otherwise a Mistral's, even for a Llama.
    """
    windows = [layer.grouped.window for layer in config.pattern]
    common = llama_like.config_json(config) | {
        "head_dim": config.attention.head_dim,
        "intermediate_size": config.routed.intermediate,
        "sliding_window": max((each for each in windows if each is not None), default=None),
    }
    if len(set(windows)) == 1:
        return common | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return common | {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of published checkpoints."""
    yield from llama_like.global_tensors(config)
    for layer in range(config.layers):
        yield from llama_like.attention_tensors(config, layer)
        for part in ("gate", "down", "up"):
            name = f"model.layers.{layer}.mlp.{part}_proj.weight"
            yield Stored(name, [f"layers.{layer}.experts.0.{part}"])


LLAMA = Architecture(
    model_types=("llama", "mistral", "ministral"),
    shapes=(),
    sources={},
    read=read,
    config_json=config_json,
    tensors=tensors,
    extra_tensors=llama_like.extra_tensors,
)
