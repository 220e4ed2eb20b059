"""The description that each supported architecture's file gives, and the tensors in checkpoint files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.config_file import CONFIG_NAME, ConfigFile
from moesched.models.formats import CHOICES


class Stored(NamedTuple):
    """A tensor in a checkpoint file, and the tensors of the model that it contains, one after the other.

    The model's tensors have canonical names, the same for all architectures, such as "layers.0.experts.3.up".

    Attributes:
        name: the tensor's name in the file.
        parts: canonical names of the model's tensors in it.
        stacks: length of the first axis, such as a layer's number of experts, of a tensor of shape (stacks, rows /
            stacks, columns), where `rows` is the number of rows of all parts together. 0 for a tensor without this
            axis.
    """

    name: str
    parts: Sequence[str]
    stacks: int = 0


COMMON_FORMATS = tuple(name for name in CHOICES if name != "mxfp4")
"""Formats that any model can be stored in: all but mxfp4, in which only models are stored that were trained in it."""


def _none(config: ModelConfig) -> Iterator[Any]:
    return iter(())


def _no_files(config: ModelConfig) -> Any:
    raise BadInput(f"{config.name} is only simulated: no weights of {config.form} can be read or written")


class Architecture(NamedTuple):
    """The description of one architecture: how its files are read and written, and its known models.

    Architectures that are only simulated leave out the last four attributes.

    Attributes:
        model_types: values of `model_type` in config.json.
        shapes: configurations of known models.
        sources: by name of a known model, the place where its sizes are published.
        read: function that converts config.json to a ModelConfig; raises BadInput.
        formats: names of the storage formats that its models can have.
        left_out: names of tensors outside the layers that the publisher does not count among the active parameters.
        runs: whether devices have kernels for the architecture.
        config_json: function that converts a ModelConfig to keys of config.json, without those that all models have.
        tensors: function that yields the tensors of a published checkpoint.
        other_tensors: function that yields tensors that may stand in place of published ones, such as all experts of a
            layer in one tensor.
        extra_tensors: function that yields patterns, with *, of names of tensors. Published checkpoints have these
            tensors, but they are not needed and are skipped. Any other unknown tensor is refused, since it belongs to
            another model.
    """

    model_types: tuple[str, ...]
    shapes: tuple[ModelConfig, ...]
    sources: Mapping[str, str]
    read: Callable[[ConfigFile], ModelConfig]
    formats: tuple[str, ...] = COMMON_FORMATS
    left_out: tuple[str, ...] = ()
    runs: bool = True
    config_json: Callable[[ModelConfig], dict[str, Any]] = _no_files
    tensors: Callable[[ModelConfig], Iterator[Stored]] = _no_files
    other_tensors: Callable[[ModelConfig], Iterator[Stored]] = _none
    extra_tensors: Callable[[ModelConfig], Iterator[str]] = _none


def known_model(read: Callable[[ConfigFile], ModelConfig], name: str, **keys: Any) -> ModelConfig:
    """Return the configuration of a known model with weights in bfloat16.

    Args:
        read: function that converts config.json to a ModelConfig.
        keys: the keys of the model's config.json that differ from the architecture's defaults.
    """
    return read(ConfigFile(Path(CONFIG_NAME), keys, name, lambda: "bfloat16"))
