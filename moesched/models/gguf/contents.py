"""The contents of GGUF files, as those of any model's files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moesched.errors import BadInput
from moesched.models.coded_models import with_formats
from moesched.models.config import ModelConfig
from moesched.models.contents import Contents, Names, require_counts, require_shape
from moesched.models.formats import role_of
from moesched.models.gguf.config import family_of, gguf_config
from moesched.models.gguf.families import gguf_tensors, single_expert_tensors
from moesched.models.gguf.parts import read_parts
from moesched.models.gguf.types import BY_NAME, READABLE
from moesched.models.headers import Found
from moesched.models.published import Published, with_shapes
from moesched.models.stored_formats import StoredFormat
from moesched.system.near_names import with_nearest

HEADER = "its header"


def gguf_contents(path: Path) -> Contents:
    """The contents of a model's files.

    Args:
        path: the only file, or any part of a split model.

    Raises:
        BadInput: a file is missing or not valid, or no device has kernels for the model.
    """
    parts = read_parts(path)
    config, tensors = gguf_config(parts), parts.shards.tensors
    require_counts(parts.path, config, tensors, HEADER)
    family = family_of(parts)
    names = Names(
        with_shapes(config, gguf_tensors(family, config)),
        lambda: with_shapes(config, single_expert_tensors(config)),
    )
    return Contents(
        parts.path, _with_formats(config, tensors, names), parts.shards, names, HEADER, _checked_format
    )


def _checked_format(found: Found, published: Published) -> StoredFormat:
    require_shape(found, published.shape, HEADER)
    return _format_of(found)


def _format_of(found: Found) -> StoredFormat:
    kind = BY_NAME[found.entry.dtype]
    if kind.stored is None:
        remedy = with_nearest(kind.name, READABLE, f"use a file with {', '.join(READABLE)}")
        raise BadInput(f"{found.file}: {found.name} is of type {kind.name}, which no kernel reads: {remedy}")
    return kind.stored


def _with_formats(config: ModelConfig, tensors: Iterable[Found], names: Names) -> ModelConfig:
    """The model with the formats that its tensors keep."""
    formats: dict[str, StoredFormat] = {}
    of_experts: dict[str, StoredFormat] = {}
    for found in tensors:
        published = names.get(found.name)
        for name, _ in () if published is None else published.parts:
            stored = formats[name] = _format_of(found)
            if of_experts.setdefault(_of_any_expert(name), stored) != stored:
                raise BadInput(
                    f"{found.file}: {found.name} is of type {found.entry.dtype}, other experts of its layer are of "
                    "another: use a file in which they are alike"
                )
            if stored.codes is not None and role_of(name) == "small":
                raise BadInput(
                    f"{found.file}: {found.name} is of type {found.entry.dtype}, and norms and routers have to be "
                    "plain: use a file in which they are F32"
                )
    return with_formats(config, formats)


def _of_any_expert(name: str) -> str:
    """The canonical name of a tensor without the number of its expert."""
    prefix, experts, number_and_part = name.partition(".experts.")
    return prefix + experts + number_and_part.lstrip("0123456789")
