"""Reads what a model's GGUF files contain: configuration, tensors and vocabulary."""

from __future__ import annotations

import re
from pathlib import Path

from moesched.errors import BadInput
from moesched.models.coded_models import with_formats
from moesched.models.config import ModelConfig
from moesched.models.contents import Contents, Names, require_counts, require_shape
from moesched.models.formats import role_of
from moesched.models.gguf.config import family_of, gguf_config
from moesched.models.gguf.parts import read_parts
from moesched.models.gguf.rotation import FACTORS
from moesched.models.gguf.tensor_names import gguf_tensors, single_expert_tensors
from moesched.models.gguf.types import BY_NAME, READABLE
from moesched.models.gguf.vocabulary import read_vocabulary
from moesched.models.headers import FoundTensor
from moesched.models.published import Published, with_shapes
from moesched.models.stored_formats import StoredFormat
from moesched.system.near_names import with_nearest

HEADER = "its header"


def gguf_contents(path: Path) -> Contents:
    """Read the headers of a model's GGUF files.

    Args:
        path: the only file, or any part of a split model.

    Raises:
        BadInput: a file is missing or not valid, or no device has kernels for the model.
    """
    parts = read_parts(path)
    vocabulary = read_vocabulary(parts)
    config, tensors = gguf_config(parts, vocabulary), parts.shards.tensors
    require_counts(parts.path, config, tensors, HEADER)
    names = Names(
        with_shapes(config, gguf_tensors(family_of(parts), config)),
        lambda: with_shapes(config, single_expert_tensors(config)),
        _unused(config),
    )
    return Contents(parts.path, config, parts.shards, names, HEADER, _format_of, vocabulary)


def read_gguf_config(path: Path) -> ModelConfig:
    """Read the configuration of a model, with the formats of its tensors.

    Args:
        path: the only GGUF file, or any part of a split model.

    Raises:
        BadInput: a file is missing or not valid, or no device has kernels for the model.
    """
    contents = gguf_contents(path)
    formats: dict[str, StoredFormat] = {}
    for found in contents.shards.tensors:
        if (published := contents.names.get(found.name)) is not None:
            formats |= dict.fromkeys((name for name, _ in published.parts), _format_of(found, published))
    return with_formats(contents.config, formats)


def _unused(config: ModelConfig) -> re.Pattern[str]:
    """Return a pattern for the names of tensors that are not needed: rotation factors, multi-token prediction layer."""
    prediction = rf"|blk\.{config.layers}\..*" if config.unused_weights else ""
    return re.compile(re.escape(FACTORS) + prediction)


def _format_of(found: FoundTensor, published: Published) -> StoredFormat:
    kind = BY_NAME[found.entry.dtype]
    if kind.stored is None:
        remedy = with_nearest(kind.name, READABLE, f"use a file with {', '.join(READABLE)}")
        raise BadInput(f"{found.file}: {found.name} is of type {kind.name}, which no kernel reads: {remedy}")
    if kind.stored.codes is not None and role_of(published.parts[0][0]) == "small":
        raise BadInput(
            f"{found.file}: {found.name} is of type {kind.name}, and norms, biases and routers have to be plain: use a "
            "file in which they are F32"
        )
    require_shape(found, published.shape, HEADER)
    return kind.stored
