"""Reads headers of GGUF files: metadata, and the place of each tensor.

Every count and length is compared with the rest of the file before memory is allocated for it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.models.file_identity import FileIdentity
from moesched.models.gguf.types import TENSOR_TYPES, TensorType
from moesched.models.headers import RESTORE, Entry, FoundTensor, require_count
from moesched.system.input_file import is_file, open_input
from moesched.system.plain_text import shown

Value = int | float | bool | str | tuple[int | float | bool | str, ...]
"""A value of the metadata; a tuple is an array."""

MOST_HEADER_BYTES = 32 << 20
"""Largest number of bytes of a header; the header of Gemma 4, with its vocabulary, has 16 MB."""
MOST_KEYS = 1 << 12
MOST_ITEMS = 1 << 20
"""Largest number of items of an array; Gemma 4 has 515,000 merges."""
LONGEST_KEY = 1 << 16
LONGEST_TEXT = 1 << 20
"""Largest number of bytes of a text; the longest published chat templates have 30 kB."""
MOST_DIMENSIONS = 4

MAGIC = int.from_bytes(b"GGUF", "little")
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Offsets of tensors are multiples of this number of bytes, unless the metadata say otherwise."""
UNSIGNED, FLOAT32, FLAG, TEXT, ARRAY = 4, 6, 7, 8, 9
"""Types of values."""

_PIECE = 1 << 20
_NUMBER, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Letters of `struct` for numbers, by the type of a value."""


class GgufHeader(NamedTuple):
    """The contents of the header of a GGUF file.

    Attributes:
        metadata: values by key.
        tensors: the tensors in the file. The dtype of an entry is the name of a `TensorType`; its shape is in weights,
            not in bytes.
        identity: identity of the file before the header was read.
    """

    path: Path
    metadata: dict[str, Value]
    tensors: list[FoundTensor]
    identity: FileIdentity


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        BadInput: the file cannot be read, is truncated, or is no valid GGUF file of version 2 or 3.
    """
    with open_input(path, "weights", remedy=RESTORE) as file:
        identity = FileIdentity.of(os.fstat(file.fileno()))
        source = _Source(path, file, identity.size)
        tensors, entries = _require_version(source), source.length()
        metadata = _read_metadata(source, entries)
        found = _read_tensors(source, tensors, _alignment(path, metadata))
    return GgufHeader(path, metadata, found, identity)


class _Source:
    """Reader that returns the values of a GGUF header in order, and reads no more of the file than needed.

    Attributes:
        at: offset of the next value in the file, in bytes.
        about: name of the value that is read now, for error messages.
    """

    def __init__(self, path: Path, file: FileIO, size: int) -> None:
        self.path = path
        self.size = size
        self.at = 0
        self.about = "its beginning"
        self._file = file
        self._data = bytearray()

    def number(self) -> int:
        """Take the next 4 bytes as an unsigned number."""
        number: int = _NUMBER.unpack_from(self._data, self._taken(4))[0]
        return number

    def length(self) -> int:
        """Take the next 8 bytes as an unsigned number."""
        length: int = _LENGTH.unpack_from(self._data, self._taken(8))[0]
        return length

    def text(self, longest: int = LONGEST_TEXT) -> str:
        """Take the next text, which is stored as its length in bytes and then its bytes.

        Args:
            longest: limit of the length in bytes.
        """
        length = self.length()
        if length > longest:
            raise self.broken(f"it has a text of {length:,} bytes, which no real file has")
        start = self._taken(length)
        try:
            return str(memoryview(self._data)[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise self.broken("it has a text that is not UTF-8") from None

    def numbers(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        """Take the next `count` numbers of one type.

        Args:
            code: format character of the type, as in the module `struct`.
        """
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack_from(self._data, self._taken(layout.size))

    def broken(self, why: str) -> BadInput:
        """Return the error for a file that is not valid."""
        return BadInput(f"{self.path}: {self.about}: {why}; {RESTORE}")

    def _taken(self, nbytes: int) -> int:
        """Take the next `nbytes` bytes, and return the offset of their first byte in `_data`."""
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self._data):
            self._read_to(self.at)
        return start

    def _read_to(self, end: int) -> None:
        if end > self.size:
            raise self.broken(f"the file is truncated: it has {self.size:,} bytes, and needs {end:,}")
        if end > MOST_HEADER_BYTES:
            raise self.broken(f"the header has more than {MOST_HEADER_BYTES:,} bytes, which no real file has")
        while len(self._data) < end:
            piece = self._file.read(max(_PIECE, end - len(self._data)))
            if not piece:
                raise self.broken("the file became shorter while it was read")
            self._data += piece


def _require_version(source: _Source) -> int:
    """Check that a file is a GGUF file of a supported version, and return the number of its tensors."""
    if source.number() != MAGIC:
        folder = source.path.parent
        beside = f", such as {folder}" if is_file(folder / "config.json") else ""
        raise BadInput(
            f"{source.path} is not a GGUF file: it does not begin with GGUF; give a model's folder{beside}, "
            f"or {RESTORE}"
        )
    version = source.number()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "big-endian" if swapped else f"of GGUF version {version:,}"
        raise BadInput(f"{source.path} is {what}: convert it to version 3, little-endian")
    tensors = source.length()
    require_count(tensors, str(source.path))
    return tensors


def _read_name(source: _Source) -> str:
    """Take the name of a key or tensor; error messages then name this key or tensor."""
    name = source.text(LONGEST_KEY)
    if not name.isprintable():
        raise source.broken(f"its name {shown(name)} cannot be shown")
    source.about = shown(name)
    return name


# ---------------------------------------------------------------- metadata


def _read_metadata(source: _Source, count: int) -> dict[str, Value]:
    source.about = "its metadata"
    if count > MOST_KEYS:
        raise source.broken(f"they have {count:,} keys, and no real file has more than {MOST_KEYS:,}")
    metadata: dict[str, Value] = {}
    for number in range(count):
        source.about = f"key {number + 1:,} of its metadata"
        key = _read_name(source)
        if key in metadata:
            raise source.broken("its metadata have this key twice")
        metadata[key] = _read_value(source)
    return metadata


def _read_value(source: _Source) -> Value:
    kind = source.number()
    if kind == TEXT:
        return source.text()
    if kind == ARRAY:
        return _read_array(source)
    [number] = source.numbers(_code(source, kind), 1)
    return _decimal(number) if kind == FLOAT32 else number


def _decimal(number: float) -> float:
    """Return the shortest decimal number that is the same in float32, such as 1e-6 for 9.999999974752427e-07."""
    stored = struct.pack("<f", number)
    decimals = (float(f"{number:.{digits}g}") for digits in range(6, 9))
    return next((each for each in decimals if struct.pack("<f", each) == stored), number)


def _read_array(source: _Source) -> Value:
    kind, count = source.number(), source.length()
    if count > MOST_ITEMS:
        raise source.broken(
            f"it is an array of {count:,} items, and no real file has more than {MOST_ITEMS:,}"
        )
    if kind == TEXT:
        return tuple(source.text() for _ in range(count))
    return source.numbers(_code(source, kind), count)


def _code(source: _Source, kind: int) -> str:
    if kind not in _CODES:
        raise source.broken(f"its value is of type {kind:,}, which is unknown")
    return _CODES[kind]


def _alignment(path: Path, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise BadInput(
            f"{path}: general.alignment is {shown(alignment)}, and must be a power of two; {RESTORE}"
        )
    return alignment


# ---------------------------------------------------------------- tensors


def _read_tensors(source: _Source, count: int, alignment: int) -> list[FoundTensor]:
    entries: dict[str, Entry] = {}
    for number in range(count):
        source.about = f"tensor {number + 1:,}"
        name = _read_name(source)
        if name in entries:
            raise source.broken("the file has this tensor twice")
        entries[name] = _read_entry(source, alignment)
    start = -(-source.at // alignment) * alignment
    _require_apart(source, entries.items(), start)
    return [FoundTensor(source.path, name, entry, start) for name, entry in entries.items()]


def _read_entry(source: _Source, alignment: int) -> Entry:
    dimensions = source.number()
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise source.broken(f"it has {dimensions:,} dimensions, and may have 1 to {MOST_DIMENSIONS}")
    lengths = [source.length() for _ in range(dimensions)]
    kind, offset = source.number(), source.length()
    if kind not in TENSOR_TYPES:
        raise source.broken(f"it is of type {kind:,}, which is unknown")
    if min(lengths) < 1:
        raise source.broken(f"its dimensions are {lengths}, and must be positive")
    if offset % alignment:
        raise source.broken(f"it begins at byte {offset:,} of the weights, no multiple of {alignment:,}")
    nbytes = _bytes_of(source, TENSOR_TYPES[kind], lengths)
    return Entry(TENSOR_TYPES[kind].name, tuple(reversed(lengths)), (offset, offset + nbytes))


def _bytes_of(source: _Source, kind: TensorType, lengths: list[int]) -> int:
    row, *others = lengths
    if row % kind.block:
        raise source.broken(f"its rows have {row:,} weights, and blocks of {kind.name} have {kind.block}")
    return row // kind.block * kind.block_bytes * math.prod(others)


def _require_apart(source: _Source, entries: Iterable[tuple[str, Entry]], start: int) -> None:
    """Check that no tensor overlaps another one, or ends beyond the end of the file.

    Args:
        entries: the tensors, by name.
        start: offset of the first tensor in the file.
    """
    end, before = 0, ""
    for name, entry in sorted(entries, key=lambda each: each[1].data_offsets):
        source.about = shown(name)
        if entry.data_offsets[0] < end:
            raise source.broken(f"it overlaps {shown(before)}")
        end, before = entry.data_offsets[1], name
    if start + end > source.size and before:
        raise source.broken(
            f"the file is truncated: it has {source.size:,} bytes, and the tensor ends at {start + end:,}"
        )
