"""Granite-MoE with shared experts: a layer also has a feed-forward network that every token uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from moesched.models.architectures import granite_moe, llama_like
from moesched.models.architectures.architecture import Architecture, Stored
from moesched.models.architectures.granite_moe import GraniteMoeKeys
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile


class GraniteMoeSharedKeys(GraniteMoeKeys, kw_only=True):
    """The key of config.json that is read in addition to Granite-MoE's keys, with its default."""

    shared_intermediate_size: int = 0


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    shared = file.keys(GraniteMoeSharedKeys).shared_intermediate_size
    config = granite_moe.read(file)
    config = config.varied(shared=shared, shared_scale=config.residual_factor)
    return file.checked(replace(config, form="granite_moe_shared"))


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    return granite_moe.config_json(config) | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": config.routed.shared,
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of published checkpoints; one tensor has the gate and up matrices of the shared network."""
    yield from granite_moe.tensors(config)
    for layer in range(config.layers):
        block, ours = f"model.layers.{layer}.shared_mlp.", f"layers.{layer}.shared_"
        yield Stored(block + "input_linear.weight", [ours + "gate", ours + "up"])
        yield Stored(block + "output_linear.weight", [ours + "down"])


GRANITE_MOE_SHARED = Architecture(
    model_types=("granitemoeshared",),
    shapes=(),
    sources={},
    read=read,
    config_json=config_json,
    tensors=tensors,
    extra_tensors=llama_like.extra_tensors,
)
