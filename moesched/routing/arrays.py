"""Reads arrays from .npy and .npz files that may come from anyone, without trust in the files' headers."""

from __future__ import annotations

import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from moesched.errors import BadInput
from moesched.system.plain_text import shown

Array = npt.NDArray[Any]

NPY_MAGIC = b"\x93NUMPY"
NPZ_MAGIC = b"PK\x03\x04"

MOST_BYTES = 400_000_000
"""Most bytes of a file's arrays together: 1.5 million tokens of a model with 32 layers and 8 experts per token."""
MOST_ARRAYS = 10_000

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

# Errors of zipfile, of zlib, and of numpy's headers, which are Python expressions.
_UNREADABLE = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, SyntaxError, MemoryError),
    *(RuntimeError, OverflowError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


def read_npy(where: str, data: bytes) -> Array:
    """Parse the bytes of an .npy file; returns its one array, which shares the memory of `data`.

    Args:
        where: name of the file, or of the array in it, for error messages.
        data: the whole content of the file.

    Raises:
        BadInput: the bytes are no .npy file, are cut off, or hold values other than integers or text.
    """
    stream = BytesIO(data)
    try:
        with warnings.catch_warnings(action="ignore"):  # of a damaged header, which is refused in one line
            shape, by_columns, dtype = _READ_HEADER[np.lib.format.read_magic(stream)](stream)
        if dtype.kind not in "iuU":
            raise BadInput(
                f"{where} has shape {shown(shape)} of {shown(dtype.name)}: write an array of integers"
            )
        count, start = math.prod(shape), stream.tell()
        if len(data) - start != count * dtype.itemsize:
            raise BadInput(
                f"{where} has {len(data) - start:,} bytes of values, but its shape {shown(shape)} of {dtype.name} "
                f"needs {shown(count * dtype.itemsize)}: it was cut off or damaged; copy it again"
            )
        values = np.frombuffer(data, dtype, count, start) if count else np.empty(0, dtype)
        return values.reshape(shape, order="F" if by_columns else "C")
    except _UNREADABLE as error:
        raise BadInput(f"{where} is not an array of numpy's: write it with `numpy.save`") from error


def read_npz(where: str, data: bytes) -> Iterator[tuple[str, Array]]:
    """Parse the bytes of an .npz file; yields the name and the values of each array, in the file's order.

    Args:
        where: name of the file, for error messages.
        data: the whole content of the file.

    Raises:
        BadInput: the file is damaged or cut off, has more than `MOST_ARRAYS` arrays or `MOST_BYTES` bytes when
            unpacked, or has an array that `read_npy` refuses.
    """
    if data.count(b"PK\1\2") > MOST_ARRAYS:
        raise BadInput(f"{where} has more than {MOST_ARRAYS:,} arrays: split it into files with fewer")
    try:
        with zipfile.ZipFile(BytesIO(data)) as file:
            entries = file.infolist()
            nbytes = sum(entry.file_size for entry in entries)
            if nbytes > MOST_BYTES:
                raise BadInput(f"{where} unpacks to {nbytes:,} bytes, and may have {MOST_BYTES:,}: split it")
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                yield name, read_npy(f"{where}, array {shown(name)}", _unpacked(file, entry))
    except _UNREADABLE as error:
        raise BadInput(
            f"{where} is not a whole .npz file: it was cut off or damaged; copy it again"
        ) from error


def _unpacked(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return an archived file's decompressed bytes, cut off one byte after the size that `entry` states."""
    if entry.compress_type not in _COMPRESSIONS:
        raise zipfile.BadZipFile("a compression that numpy does not write")
    with file.open(entry) as stream:
        return stream.read(entry.file_size + 1)
