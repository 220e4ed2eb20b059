"""Granite-MoE with a network that every token uses, beside the experts."""

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
    """The keys of config.json."""

    shared_intermediate_size: int = 0


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    shared = file.keys(GraniteMoeSharedKeys).shared_intermediate_size
    config = granite_moe.read(file)
    config = config.varied(shared=shared, shared_scale=config.residual_factor)
    return file.checked(replace(config, form="granite_moe_shared"))


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that are particular to the architecture."""
    return granite_moe.config_json(config) | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": config.routed.shared,
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """The tensors of published checkpoints: gate and up of the shared network are one."""
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
