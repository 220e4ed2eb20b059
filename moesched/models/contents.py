"""The contents of a model's files: tensors, and the names and shapes that its configuration gives them."""

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
from moesched.models.headers import MOST_TENSORS, Found
from moesched.models.published import Published
from moesched.models.shards import Shards
from moesched.models.stored_formats import StoredFormat
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import count_tensors, count_weights


class Names:
    """The tensors of a model by their names in files; only for the forms that the files use.

    Args:
        published: the tensors of published files.
        others: makes those that replace some of these in files of another form.
        extra: a pattern for the names of tensors that the model has no use for.
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
        """The tensor with this name; None if there is none."""
        name = without_prefix(name)
        return self._published.get(name) or self._others.get(name)

    def is_extra(self, name: str) -> bool:
        """Test whether the model has no use for a tensor with this name."""
        return self._extra is not None and self._extra.fullmatch(without_prefix(name)) is not None


class Contents(NamedTuple):
    """The contents of a model's files.

    Attributes:
        path: the model's folder or file.
        described_in: the place of the configuration, for messages.
        format_of: returns the format of a stored tensor's rows; raises BadInput if no kernel reads it, or if the tensor
            has another shape than the published one.
        vocabulary: that of a GGUF file; None for a folder, which has files for it.
    """

    path: Path
    config: ModelConfig
    shards: Shards
    names: Names
    described_in: str
    format_of: Callable[[Found, Published], StoredFormat]
    vocabulary: Vocabulary | None = None


def without_prefix(name: str) -> str:
    """The name of a tensor without the prefix "model.", as in a checkpoint that was saved without an LM head."""
    return name.removeprefix("model.")


def by_stored_name(tensors: Mapping[str, Published]) -> dict[str, Published]:
    """Key tensors by the names that `Names` looks up, which have no "model." in front."""
    return {without_prefix(name): stored for name, stored in tensors.items()}


def require_shape(found: Found, shape: Shape, described_in: str) -> None:
    """Raise BadInput if a stored tensor has another shape."""
    if found.entry.shape != shape:
        what = f"{found.name} has shape {list(found.entry.shape)}, {described_in} says {list(shape)}"
        raise BadInput(f"{found.file}: {what}; use the configuration and the weights of one checkpoint")


def require_counts(path: Path, config: ModelConfig, found: Iterable[Found], described_in: str) -> None:
    """Check, before tables of its size are made, that a configuration is not far larger than the files' contents."""
    stored = sum(math.prod(tensor.entry.shape) for tensor in found)
    described, tensors = count_weights(config), count_tensors(config)
    if described > 2 * stored or tensors > MOST_TENSORS:
        raise BadInput(
            f"{path}: {described_in} describes {config.layers:,} layers with {config.routed.experts:,} experts, "
            f"{described:,} weights in {tensors:,} tensors, and the files hold {stored:,}; "
            f"copy all files of the checkpoint, or correct {described_in}"
        )
