"""Llama and Mistral: dense models, treated as models with a single expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, Stored
from moesched.models.architectures.llama_like import LlamaLikeKeys
from moesched.models.architectures.mixtral import window
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile


class LlamaKeys(LlamaLikeKeys, kw_only=True):
    """Keys of a Llama's config.json."""

    intermediate_size: int = 11008
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048


class MistralKeys(LlamaLikeKeys, kw_only=True):
    """Keys of a Mistral's config.json."""

    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] = ()


def read(file: ConfigFile) -> ModelConfig:
    """Convert the config.json of a Llama or Mistral."""
    if file.model_type == "llama":
        return _build(file, file.keys(LlamaKeys), None)
    keys = file.keys(MistralKeys)
    return _build(file, keys, window(file, keys.sliding_window, keys.layer_types))


def _build(file: ConfigFile, keys: LlamaLikeKeys, sliding_window: int | None) -> ModelConfig:
    return file.build(
        keys, **llama_like.settings(keys), experts=1, top_k=1, sliding_window=sliding_window, form="llama"
    )


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Write a Mistral's config.json, which describes either."""
    return llama_like.config_json(config) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "sliding_window": config.sliding_window,
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """The tensors of published checkpoints."""
    yield from llama_like.global_tensors(config)
    for layer in range(config.layers):
        yield from llama_like.attention_tensors(config, layer)
        for part in ("gate", "down", "up"):
            name = f"model.layers.{layer}.mlp.{part}_proj.weight"
            yield Stored(name, [f"layers.{layer}.experts.0.{part}"])


LLAMA = Architecture(
    model_types=("llama", "mistral"),
    shapes=(),
    sources={},
    read=read,
    config_json=config_json,
    tensors=tensors,
    other_tensors=lambda config: iter(()),
    extra_tensors=llama_like.extra_tensors,
)
