"""Contents of a model's files: the tensors in the files, and the names and shapes that the configuration expects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.gguf.vocabulary import Vocabulary
from moesched.models.headers import MOST_TENSORS, FoundTensor
from moesched.models.published import Published
from moesched.models.shards import Shards
from moesched.models.stored_formats import StoredFormat
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import count_tensors, count_weights


class Names:
    """The tensors that a model's files may have, by their names in files.

    Args:
        published: the tensors of published files, by name.
        others: function that returns, by name, tensors that files may have in place of published ones, such as all
            experts of a layer in one tensor. It is called at the first look-up of a name that is not in `published`.
        extra: a pattern for the names of tensors that are not needed; None if there are none.
    """

    def __init__(
        self,
        published: Mapping[str, Published],
        others: Callable[[], Mapping[str, Published]],
        extra: re.Pattern[str] | None = None,
    ) -> None:
        self._published = by_stored_name(published)
        self._make_others = others
        self._extra = extra

    @cached_property
    def _others(self) -> dict[str, Published]:
        return by_stored_name(self._make_others())

    def get(self, name: str) -> Published | None:
        """Return the description of the tensor with this name; None if the model has no such tensor."""
        name = without_prefix(name)
        return self._published.get(name) or self._others.get(name)

    def is_extra(self, name: str) -> bool:
        """Test whether a tensor with this name may be skipped, since the model does not use it."""
        return self._extra is not None and self._extra.fullmatch(without_prefix(name)) is not None


class Contents(NamedTuple):
    """The contents of a model's files.

    Attributes:
        path: the model's folder or file.
        config: the model's configuration.
        shards: the tensors in the files.
        names: the tensors that the files may have, by their names in files.
        described_in: the place of the configuration, in words, for error messages.
        format_of: function from a stored tensor and its description to the format of its rows; raises BadInput if no
            kernel reads it, or if the tensor has another shape than its description.
        vocabulary: the vocabulary in a GGUF file; None for a folder, which has separate files for its tokenizer.
    """

    path: Path
    config: ModelConfig
    shards: Shards
    names: Names
    described_in: str
    format_of: Callable[[FoundTensor, Published], StoredFormat]
    vocabulary: Vocabulary | None = None


def without_prefix(name: str) -> str:
    """Return a tensor's name without the prefix "model."; checkpoints saved without an LM head lack the prefix."""
    return name.removeprefix("model.")


def by_stored_name(tensors: Mapping[str, Published]) -> dict[str, Published]:
    """Return descriptions of tensors by name in files, with the prefix "model." removed from each name."""
    return {without_prefix(name): stored for name, stored in tensors.items()}


def require_shape(found: FoundTensor, shape: Shape, described_in: str) -> None:
    """Raise BadInput if a stored tensor has another shape than `shape`.

    Args:
        described_in: the place of the configuration, in words, for the message.
    """
    if found.entry.shape != shape:
        what = f"{found.name} has shape {list(found.entry.shape)}, {described_in} says {list(shape)}"
        raise BadInput(f"{found.file}: {what}; use the configuration and the weights of one checkpoint")


def require_counts(path: Path, config: ModelConfig, found: Iterable[FoundTensor], described_in: str) -> None:
    """Raise BadInput if a configuration describes far more weights than the files contain.

    The check comes before any table is made whose size depends on the configuration.

    Args:
        described_in: the place of the configuration, in words, for the message.
    """
    stored = sum(math.prod(tensor.entry.shape) for tensor in found)
    described, tensors = count_weights(config), count_tensors(config)
    if described > 2 * stored or tensors > MOST_TENSORS:
        raise BadInput(
            f"{path}: {described_in} describes {config.layers:,} layers with {config.routed.experts:,} experts, "
            f"{described:,} weights in {tensors:,} tensors, and the files hold {stored:,}; "
            f"copy all files of the checkpoint, or correct {described_in}"
        )
