"""Reads a model's configuration from its files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from msgspec.structs import asdict, replace

from moesched.errors import BadInput
from moesched.models.architectures import ARCHITECTURES, BY_MODEL_TYPE
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.contents import without_prefix
from moesched.models.gguf.config import gguf_config
from moesched.models.gguf.contents import read_gguf_config
from moesched.models.gguf.parts import is_gguf, read_parts
from moesched.models.gguf.vocabulary import read_vocabulary
from moesched.models.layers import Layer
from moesched.models.networks import SILU
from moesched.models.quantization import in_stored_format
from moesched.models.shapes import SHAPES
from moesched.models.shards import stored_names

HEAD = "lm_head.weight"
"""Name of the LM head in files of all families. If there is one, it is used whatever config.json says of it."""

ALIKE = ("heads", "kv_heads", "head_dim", "rotary")
"""Settings of attention that all layers of a model must share, so that devices can run it."""
ALIKE_OF_EXPERTS = ("experts", "top_k", "intermediate", "alternating", "transposed_down")
"""Settings of experts that all layers with experts must share, so that devices can run the model."""


def read_config(model: Path | str, stored_as: str | None = None) -> ModelConfig:
    """Read the configuration of a model: config.json of a folder, or the header of a GGUF file.

    A missing or null setting in config.json has Hugging Face's default.

    Args:
        stored_as: storage format of the weights; None for the one that the files describe.

    Raises:
        BadInput: a file cannot be read, or asks for a feature that the kernels do not support; the message names
            the file, the value and the remedy.
    """
    path = Path(model)
    if not is_gguf(path):
        return _read_folder(path, stored_as)
    if stored_as is None:
        return read_gguf_config(path)
    parts = read_parts(path)
    return in_format(gguf_config(parts, read_vocabulary(parts)), stored_as)


def _read_folder(directory: Path, stored_as: str | None) -> ModelConfig:
    if str(directory) in SHAPES and not directory.exists():
        raise BadInput(
            f"{directory} is a name for predictions: give a folder with its weights, or write random ones with "
            f"`moesched random-model {directory} PATH`"
        )
    file = ConfigFile.in_folder(directory)
    if file.model_type not in BY_MODEL_TYPE:
        raise file.unsupported("model_type", file.model_type, f"one of {', '.join(sorted(BY_MODEL_TYPE))}")
    config = BY_MODEL_TYPE[str(file.model_type)].read(file)
    quantization = file.quantization
    if stored_as is not None:
        config = in_format(config, stored_as)
    elif quantization is not None:
        config = in_stored_format(config, file, quantization)
    if config.tied_embeddings and HEAD in map(without_prefix, stored_names(directory)):
        config = replace(config, tied_embeddings=False)
    return config


def in_format(config: ModelConfig, name: str) -> ModelConfig:
    """Return the model with its weights in the storage format `name`.

    Raises:
        BadInput: there is no such format, or models of this family do not have it.
    """
    formats = ARCHITECTURES[config.form].formats
    if name not in formats:
        raise BadInput(
            f"--format is {name!r}, and models of the family {config.form}, such as {config.name}, have "
            f"{', '.join(formats)}: give one of these"
        )
    return replace(config, format=name)


def runs(config: ModelConfig) -> bool:
    """Test whether devices have kernels for the model's family."""
    return ARCHITECTURES[config.form].runs


def require_plain_layers(config: ModelConfig, who: str) -> None:
    """Raise BadInput if a model has parts that a device or feature does not compute.

    Such parts are biases, attention sinks, clipped activations, shared experts, and factors of embeddings, residual or
    logits.

    Args:
        who: the device or feature, in words for the message.
    """
    found = {part for layer in config.kinds for part in _particular(layer)}
    if (config.embedding_factor, config.residual_factor, config.logits_factor) != (1.0, 1.0, 1.0):
        found.add("factors of embeddings, residual or logits")
    if parts := sorted(found):
        raise BadInput(
            f"{config.name} has {' and '.join(parts)}, which {who} does not compute: use --device torch, or cuda, "
            "without --tensor-parallel"
        )


def _particular(layer: Layer) -> Iterator[str]:
    """Yield the parts of a layer that not all devices compute, in words."""
    attention, network = layer.grouped, layer.feed_forward
    if attention.biases:
        yield f"biases of {attention.biases}"
    if attention.sinks:
        yield "attention sinks"
    if attention.scale is not None:
        yield "a scale of attention"
    if network.biases:
        yield "biases of experts"
    if network.activation != SILU:
        yield "experts with a limit"
    if network.shared:
        yield "networks that every token uses"


def require_runs(config: ModelConfig) -> None:
    """Raise BadInput if no device has kernels for the model's family, its layers, or the format of its weights."""
    family = [] if runs(config) else [f"the family {config.form}"]
    stored = [] if config.format is None else [f"weights in {config.format}"]
    if family or stored:
        raise BadInput(
            f"{config.name}: no device has kernels for {', and for '.join(family + stored)}: "
            "use `moesched simulate` or `moesched plan`, or a model in bfloat16, float16 or float32 of "
            + ", ".join(name for name, each in ARCHITECTURES.items() if each.runs)
        )
    attentions = [asdict(layer.attention) for layer in config.kinds]
    networks = [asdict(layer.feed_forward) for layer in config.kinds if layer.feed_forward.experts]
    names = [*product(ALIKE, [attentions]), *product(ALIKE_OF_EXPERTS, [networks])]
    if differing := [name for name, kinds in names if len({kind[name] for kind in kinds}) > 1]:
        raise BadInput(
            f"{config.name}: its layers differ in {', '.join(differing)}, for which devices keep the same memory or "
            "angles in all layers: use `moesched simulate` or `moesched plan`"
        )
