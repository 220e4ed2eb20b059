"""Reads headers of the safetensors files of a checkpoint: one file, or several that an index lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.models.file_identity import FileIdentity
from moesched.models.headers import (
    LARGEST_JSON,
    RESTORE,
    FoundTensor,
    header_copy,
    read_header,
    read_header_copy,
    require_count,
)
from moesched.models.stored_formats import PLAIN, STORED_FORMATS
from moesched.models.unique_json import decode_unique
from moesched.system.input_file import is_file, read_input

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FLOATS = {STORED_FORMATS[name].in_files: STORED_FORMATS[name] for name in PLAIN}
"""The formats of plain weights, by their dtype in safetensors."""


class Shards(NamedTuple):
    """All tensors in the files of a checkpoint.

    Attributes:
        identities: for each file, its inode, size and times of last change, taken before its header was read.
        absent: for each file of which only a copy of the header is here, the file's size in bytes.
    """

    tensors: list[FoundTensor]
    identities: dict[Path, FileIdentity]
    absent: dict[Path, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_shards(directory: Path, *, partial: bool = False) -> Shards:
    """Read the headers of a checkpoint's files.

    An index must list exactly the tensors of its files, and name files of the folder. The files may be links to
    anywhere, as in the caches of model hubs.

    Args:
        partial: whether a file may be missing if the folder has a copy of its header.

    Raises:
        BadInput: a file is missing or not a valid safetensors file, or the index does not fit the files.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    shards = Shards([], {}, {})
    if is_file(single) or not is_file(index):
        shards.tensors.extend(_read_into(shards, single, partial=partial))
        return shards
    by_shard: dict[str, set[str]] = {}
    for name, shard in _read_index(index).items():
        by_shard.setdefault(shard, set()).add(name)
    for shard, listed in sorted(by_shard.items()):
        path = directory / shard
        found = _read_into(shards, path, partial=partial)
        if missing := listed.difference(tensor.name for tensor in found):
            raise BadInput(f"{path} lacks {min(missing)}, which {INDEX_NAME} puts there; {RESTORE}")
        for tensor in found:
            if tensor.name not in listed:
                raise BadInput(f"{path} has {tensor.name}, which {INDEX_NAME} does not put there; {RESTORE}")
        shards.tensors.extend(found)
    return shards


def stored_names(directory: Path) -> Collection[str]:
    """Return the names of all tensors, from the index, or the only file or its header's copy; empty without these.

    Raises:
        BadInput: the index, or the file, cannot be read.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if is_file(index) and not is_file(single):
        return _read_index(index).keys()
    file = _first_file(directory)
    return [found.name for found in _read_into(Shards([], {}, {}), file, partial=True)] if file else ()


def is_complete(directory: Path) -> bool:
    """Test whether each file of weights, or a copy of its header, is here; raises BadInput for a bad index."""
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    names = set(_read_index(index).values()) if is_file(index) and not is_file(single) else {SINGLE_NAME}
    paths = (directory / name for name in names)
    return all(is_file(path) or is_file(header_copy(path)) for path in paths)


def stored_dtype(directory: Path) -> str | None:
    """Return the dtype of most weights in the first file that exists; None if there is no file, or it has no floats.

    Raises:
        BadInput: the file, or the index, cannot be read.
    """
    file = _first_file(directory)
    if file is None:
        return None
    weights: Counter[str] = Counter()
    for found in _read_into(Shards([], {}, {}), file, partial=True):
        if found.entry.dtype in FLOATS:
            weights[FLOATS[found.entry.dtype].name] += math.prod(found.entry.shape)
    return weights.most_common(1)[0][0] if weights else None


def _first_file(directory: Path) -> Path | None:
    """Return the first file of the checkpoint that exists, or whose header copy exists; None if there is none."""
    index = directory / INDEX_NAME
    names = sorted(set(_read_index(index).values())) if is_file(index) else []
    paths = (directory / name for name in (SINGLE_NAME, *names))
    return next((path for path in paths if is_file(path) or is_file(header_copy(path))), None)


def _read_into(shards: Shards, path: Path, *, partial: bool = False) -> list[FoundTensor]:
    """Read the tensors of a file, and add the file's identity or absence to `shards`."""
    if partial and not is_file(path) and is_file(header_copy(path)):
        found, shards.absent[path] = read_header_copy(path)
        return found
    found, shards.identities[path] = read_header(path)
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Read an index, and return each tensor's file name, by the tensor's name."""
    text = read_input(path, "index", LARGEST_JSON, remedy=RESTORE)
    weight_map = decode_unique(text, _Index, str(path), RESTORE).weight_map
    require_count(len(weight_map), str(path))
    files = {shard: _within_folder(path, shard) for shard in set(weight_map.values())}
    return {tensor: files[shard] for tensor, shard in weight_map.items()}


def _within_folder(index: Path, shard: str) -> str:
    """Return a file name of the index in its shortest form; raise BadInput if it leads out of the folder."""
    name = PurePosixPath(shard)
    if not (name.parts and shard.isprintable()) or name.is_absolute() or ".." in name.parts:
        raise BadInput(f"{index} names {shard!r}, which is no file of its folder; {RESTORE}")
    return str(name)
