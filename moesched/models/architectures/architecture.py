"""The description that each architecture's file gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.formats import CHOICES


class Stored(NamedTuple):
    """A tensor in a file, and the canonical tensors (see `tensors.py`) that it contains, one after the other.

    Attributes:
        parts: canonical names of these tensors.
        stacks: length of a leading axis that divides the rows into equal parts; 0 if there is no such axis.
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
    """The particulars of one architecture, apart from the settings of `ModelConfig`.

    Architectures that are only simulated lack the last four attributes.

    Attributes:
        model_types: values of `model_type` in config.json.
        shapes: known models.
        sources: where the sizes of each known model are from, by the model's name.
        read: converts config.json to a ModelConfig; raises BadInput.
        formats: storage formats that its models can have.
        left_out: tensors outside the layers that its publisher does not count among the active parameters.
        runs: whether devices have kernels for it.
        config_json: the inverse of `read`, without the keys common to all models.
        tensors: the tensors of published checkpoints.
        other_tensors: tensors that replace some of these in checkpoints saved in another form.
        extra_tensors: name patterns, with *, of tensors in published checkpoints that the model has no use for. They
            are skipped; any other unknown tensor is refused, since it says that the model is another one.
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
