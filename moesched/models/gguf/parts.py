"""Reads the files of a GGUF model: one file, or the parts of a split model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.models.gguf.header import GgufHeader, Value, read_gguf_header
from moesched.models.shards import Shards
from moesched.system.input_file import is_file, is_folder
from moesched.system.plain_text import plain_text, shown

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


class GgufParts(NamedTuple):
    """The contents of a GGUF model's files.

    Attributes:
        path: the first file.
        metadata: metadata of the whole model, from the first file.
        shards: the tensors of all files.
    """

    path: Path
    metadata: dict[str, Value]
    shards: Shards


def is_gguf(model: Path) -> bool:
    """Test whether a model is a GGUF file rather than a folder; a path that does not exist is judged by its ending."""
    return is_file(model) or (model.suffix.lower() == SUFFIX and not is_folder(model))


def gguf_files(path: Path) -> list[Path]:
    """Return the paths of all files of a model, given the path of one of them, whether they exist or not."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    model, _, count, suffix = named.groups()
    return [path.with_name(f"{model}-{number + 1:05d}-of-{count}{suffix}") for number in range(int(count))]


def gguf_name(path: Path) -> str:
    """Return the name of a model, taken from the name of its file."""
    named = _PART.fullmatch(path.name)
    return plain_text(path.stem if named is None else named["model"])


def read_parts(path: Path) -> GgufParts:
    """Read the headers of a model's files.

    Args:
        path: the only file, or any part of a split model.

    Raises:
        BadInput: a file is missing or no valid GGUF file, or the files do not belong to one model.
    """
    first, *others = gguf_files(path) or [path]
    header = read_gguf_header(first)
    _require_whole(header, 1 + len(others))
    headers = [header, *(_read_part(each, number + 1, len(others) + 1) for number, each in enumerate(others))]
    shards = Shards([], {}, {})
    for each in headers:
        shards.tensors.extend(each.tensors)
        shards.identities[each.path] = each.identity
    _require_all_tensors(headers)
    return GgufParts(first, header.metadata, shards)


def _require_whole(first: GgufHeader, named: int) -> None:
    """Check that the first part's metadata and its file name give the same number of parts.

    Args:
        named: number of parts, by the file name.

    Raises:
        BadInput: the numbers differ, or this is not the first part.
    """
    number, count = first.metadata.get("split.no", 0), first.metadata.get("split.count", 1) or 1
    if (number, count) != (0, named):
        raise BadInput(
            f"{first.path} is part {shown(number)} of {shown(count)}, counted from 0, and by its name the first of "
            f"{named}: give the parts the names that they had, such as model-00001-of-00003.gguf"
        )


def _read_part(path: Path, number: int, count: int) -> GgufHeader:
    header = read_gguf_header(path)
    given = header.metadata.get("split.no"), header.metadata.get("split.count")
    if given != (number, count):
        raise BadInput(
            f"{path} is part {shown(given[0])} of {shown(given[1])}, counted from 0, and by its name part {number} of "
            f"{count}: copy all parts of one model"
        )
    return header


def _require_all_tensors(headers: list[GgufHeader]) -> None:
    """Check that the parts together have all tensors of the model, each once.

    Raises:
        BadInput: a tensor is in two parts, or tensors are missing.
    """
    first, where = headers[0], dict[str, Path]()
    for header in headers:
        for tensor in header.tensors:
            if (other := where.setdefault(tensor.name, header.path)) is not header.path:
                raise BadInput(
                    f"{header.path} and {other.name} both have {shown(tensor.name)}: copy all parts of one model"
                )
    expected = first.metadata.get("split.tensors.count", len(where))
    if expected != len(where):
        raise BadInput(
            f"{first.path}: its {len(headers)} parts have {len(where):,} tensors, and the model has {shown(expected)}: "
            f"copy all parts of one model"
        )
