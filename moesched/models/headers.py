"""Reads headers of safetensors files, and checks each one against the size of its file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.models.file_identity import FileIdentity
from moesched.models.unique_json import decode_unique
from moesched.system.decoding import convert_value
from moesched.system.input_file import open_input

LARGEST_JSON = 16 << 20
"""Most bytes of a header or an index: enough for 100,000 tensors, which the largest known models have in many files."""
MOST_TENSORS = 1 << 17
"""Most tensors of a model, each of which takes memory before weights are read; the largest known model has 70,000."""
RESTORE = "copy the file again from where the checkpoint came from"

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


Length = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Offset = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]


class Entry(msgspec.Struct, gc=False):
    """The entry of one tensor in a safetensors header.

    Attributes:
        data_offsets: (start, end) of the tensor's bytes, counted from the end of the header.
    """

    dtype: str
    shape: Annotated[tuple[Length, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[Offset, Offset]


class FoundTensor(msgspec.Struct, gc=False):
    """A tensor in a file.

    Attributes:
        file: the file.
        name: name of the tensor in the file.
        entry: dtype, shape and place of the tensor.
        data_start: offset in the file from which `entry.data_offsets` count.
        scales: the tensor with the scales, if this tensor has only the codes; else None.
    """

    file: Path
    name: str
    entry: Entry
    data_start: int
    scales: FoundTensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        start, end = self.entry.data_offsets
        return end - start


class Header(NamedTuple):
    """The tensors of a file, and the file's identity (inode, size and times) before the header was read."""

    tensors: list[FoundTensor]
    identity: FileIdentity


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file.

    The format demands that tensors fill the file from the end of the header to the end of the file, without overlaps or
    holes. So each byte after the header belongs to exactly one tensor.

    Raises:
        BadInput: the file is missing, no regular file, truncated, or not a valid safetensors file.
    """
    with open_input(path, "weights", remedy=f"{RESTORE}, as safetensors") as file:
        identity = FileIdentity.of(os.fstat(file.fileno()))
        text = _header_text(path, file, identity.size)
    entries = _entries(path, text)
    _require_layout(path, entries, 8 + len(text), identity.size)
    return Header(
        [FoundTensor(path, name, entry, 8 + len(text)) for name, entry in entries.items()], identity
    )


def header_copy(path: Path) -> Path:
    """Return the path of the copy of a file's header, which a folder may have in place of the file."""
    return path.with_name(f"{path.name}.header")


def read_header_copy(path: Path) -> tuple[list[FoundTensor], int]:
    """Read the copy of an absent file's header; return the file's tensors, and the file's size in bytes.

    Args:
        path: path of the absent file.

    Raises:
        BadInput: the copy is missing, or is not exactly the header of a safetensors file.
    """
    copy = header_copy(path)
    with open_input(copy, "header", remedy=RESTORE) as file:
        nbytes = os.fstat(file.fileno()).st_size
        text = _header_text(copy, file, nbytes)
    start = 8 + len(text)
    if nbytes != start:
        raise BadInput(f"{copy} has {nbytes - start:,} bytes after the header; {RESTORE}")
    entries = _entries(copy, text)
    size = start + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    _require_layout(copy, entries, start, size)
    return [FoundTensor(path, name, entry, start) for name, entry in entries.items()], size


def _entries(path: Path, text: bytes) -> dict[str, Entry]:
    where = f"{path} has no valid safetensors header"
    values = decode_unique(text, dict[str, object], where, RESTORE)
    values.pop("__metadata__", None)
    require_count(len(values), where)
    return convert_value(values, dict[str, Entry], where, RESTORE)


def require_count(tensors: int, where: str) -> None:
    """Raise BadInput if a file lists more tensors than any model has.

    Args:
        tensors: number of tensors.
        where: the file, in words, for the message.
    """
    if tensors > MOST_TENSORS:
        raise BadInput(
            f"{where}: it has {tensors:,} tensors, no model has more than {MOST_TENSORS:,}; {RESTORE}"
        )


def _header_text(path: Path, file: FileIO, size: int) -> bytes:
    if size < 8:
        raise BadInput(f"{path} is truncated: it has {size} bytes, its header alone needs more; {RESTORE}")
    length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_JSON:
        raise BadInput(
            f"{path} is not a safetensors file: its header would have {length:,} bytes, "
            f"more than {LARGEST_JSON:,}; {RESTORE}"
        )
    if 8 + length > size:
        raise BadInput(
            f"{path} is truncated: it has {size:,} bytes, its header ends at {8 + length:,}; {RESTORE}"
        )
    return file.read(length)


# ---------------------------------------------------------------- checks


def _require_layout(path: Path, entries: Mapping[str, Entry], data_start: int, size: int) -> None:
    """Check that the tensors fill a file after its header, one after the other.

    Args:
        data_start: offset of the end of the header.
        size: size of the file in bytes.

    Raises:
        BadInput: tensors overlap, there is a hole between them, or the file is too short or too long.
    """
    for name, entry in entries.items():
        if not name.isprintable():
            raise BadInput(f"{path} has a tensor {name!r}, a name that cannot be shown; {RESTORE}")
        _require_size(path, name, entry)
    order = sorted(entries.items(), key=lambda each: each[1].data_offsets)
    end, before = 0, "the header"
    for name, entry in order:
        start, stop = entry.data_offsets
        if start < end:
            raise BadInput(f"{path}: {name} overlaps {before}; {RESTORE}")
        if start > end:
            raise BadInput(f"{path}: {start - end:,} bytes before {name} belong to no tensor; {RESTORE}")
        end, before = stop, name
    if data_start + end > size:
        has = f"it has {size:,} bytes, {before} ends at {data_start + end:,}"
        raise BadInput(f"{path} is truncated: {has}; {RESTORE}")
    if data_start + end < size:
        unknown = size - data_start - end
        raise BadInput(f"{path}: {unknown:,} bytes after {before} belong to no tensor; {RESTORE}")


def _require_size(path: Path, name: str, entry: Entry) -> None:
    """Check that a tensor's offsets are in order and that their distance fits its shape and dtype.

    Dtypes of unknown size are not compared with the shape.
    """
    start, stop = entry.data_offsets
    size = _ITEM_BYTES.get(entry.dtype)
    nbytes = stop - start if size is None else math.prod(entry.shape) * size
    if start < 0 or stop - start != nbytes or nbytes < 0:
        what = f"{name} of shape {list(entry.shape)} takes {nbytes:,} bytes"
        raise BadInput(f"{path}: {what}, its header says {stop - start:,}; {RESTORE}")
