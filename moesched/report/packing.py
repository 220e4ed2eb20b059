"""Packs a JSON value and columns of numbers into base64 text, which a page holds and its scripts unpack.

The data compressed with zlib are four bytes with the length of the JSON value, the JSON value, and the columns. In the
JSON value, `{"column": type, "at": first byte, "length": number of items}` stands for a column. All numbers are
little-endian, and every column begins at a multiple of 8 bytes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from moesched.errors import BadInput

_TYPES = {"f64": "<f8", "i32": "<i4", "u32": "<u4", "u16": "<u2", "u8": "<u1"}
_ALIGNMENT = 8
_LEVEL = 6


class Columns:
    """Collects columns of numbers for the data of an HTML report, as `pack` stores them."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, kind: str, numbers: Iterable[float]) -> dict[str, Any]:
        """Append a column of numbers, and return the JSON value that stands for it in the content of `pack`.

        Args:
            kind: type of each number: "f64", "i32", "u32", "u16" or "u8".

        Raises:
            BadInput: a number does not fit the type; no recording of moesched has such a number.
        """
        listed = list(numbers)
        try:
            column = np.asarray(listed, dtype=_TYPES[kind])
        except OverflowError:
            largest = max(listed, key=abs)
            raise BadInput(f"the trace has a number {largest}, which no run has: record it again") from None
        data = column.tobytes()
        at = self._size
        self._append(data)
        return {"column": kind, "at": at, "length": len(column)}

    def pack(self, content: object) -> str:
        """Return base64 text with all columns and a JSON value, in which results of `add` stand for columns."""
        text = msgspec.json.encode(content)
        text += b" " * (-(4 + len(text)) % _ALIGNMENT)
        data = b"".join((len(text).to_bytes(4, "little"), text, *self._parts))
        return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")

    def _append(self, data: bytes) -> None:
        data += b"\0" * (-len(data) % _ALIGNMENT)
        self._parts.append(data)
        self._size += len(data)
