"""The description that each architecture's file gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile


class Stored(NamedTuple):
    """A tensor in a file, and the canonical tensors (see `tensors.py`) that it holds, one after the other.

    Attributes:
        stacks: length of a leading axis that divides the rows into equal parts; 0 if there is no such axis.
    """

    name: str
    parts: Sequence[str]
    stacks: int = 0


class Architecture(NamedTuple):
    """The particulars of one architecture, apart from the settings of `ModelConfig`.

    Attributes:
        model_types: values of `model_type` in config.json.
        shapes: known models.
        read: converts config.json to a ModelConfig; raises BadInput.
        config_json: the inverse of `read`, without the keys common to all models.
        tensors: the tensors of published checkpoints.
        other_tensors: tensors that replace some of these in checkpoints saved in another form.
        extra_tensors: name patterns, with *, of tensors in published checkpoints that the model has no use for. They
            are skipped; any other unknown tensor is refused, since it says that the model is another one.
    """

    model_types: tuple[str, ...]
    shapes: tuple[ModelConfig, ...]
    read: Callable[[ConfigFile], ModelConfig]
    config_json: Callable[[ModelConfig], dict[str, Any]]
    tensors: Callable[[ModelConfig], Iterator[Stored]]
    other_tensors: Callable[[ModelConfig], Iterator[Stored]]
    extra_tensors: Callable[[ModelConfig], Iterator[str]]
