"""What a file has to say of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile


class Stored(NamedTuple):
    """A tensor of the files, and the canonical tensors (see `tensors.py`) that lie in it one after the other.

    stacks: into how many equal parts an axis in front of the rows divides them; 0 where there is no such axis.
    """

    name: str
    parts: Sequence[str]
    stacks: int = 0


class Architecture(NamedTuple):
    """All that is particular to the models of one kind, apart from the settings of `ModelConfig`.

    model_types: what the model_type of their config.json may be. shapes: known models. read: a config.json as a
    ModelConfig; raises BadInput. config_json: the other way round, without the keys that all models share.
    tensors: what published checkpoints hold. other_tensors: what checkpoints in other forms hold instead of some of it.
    """

    model_types: tuple[str, ...]
    shapes: tuple[ModelConfig, ...]
    read: Callable[[ConfigFile], ModelConfig]
    config_json: Callable[[ModelConfig], dict[str, Any]]
    tensors: Callable[[ModelConfig], Iterator[Stored]]
    other_tensors: Callable[[ModelConfig], Iterator[Stored]]
