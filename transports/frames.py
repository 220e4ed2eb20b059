"""What goes over the wire: a fixed header, an array's bytes, a line of text. Nothing is ever unpickled.

Little-endian, 96 bytes, then the array's elements in C order, then the text (UTF-8), which fills the rest:

    magic       4 bytes   "MoEx"
    version     1         1
    kind        1         Kind: what the frame is for
    dtype       1         the place in DTYPES
    dimensions  1         0 to 8
    epoch       8         which start of the cluster this is
    sequence    8         the number of the exchange between these ranks, from 0
    ticket      8         Exchange.ticket
    step        8         Exchange.step
    layer       8         Exchange.layer
    elements    8         how many follow: all of the array's, or a piece of them
    rank        2         the sender
    root        2         of a broadcast or a gather
    text bytes  2
    operation   1         the Kind that names the exchange: ALL_REDUCE, BROADCAST or GATHER
    padding     1
    shape       8 x 4     of the whole array; zero beyond the dimensions
"""

from __future__ import annotations

import struct
from enum import IntEnum
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesched.errors import TransportError

if TYPE_CHECKING:
    from moesched.seams import Array

MAGIC = b"MoEx"
VERSION = 1
HEADER = struct.Struct("<4sBBBBQQqqqQHHHBx8I")
DIMENSIONS = 8
TEXT_BYTES = 4096
"""A longer text is cut, and ends in a digest of the whole."""

JOINED_UP_TO = 64 * 1024
"""Larger frames are put together in memory that the socket sends from; smaller ones are cheaper to copy."""

DTYPES = tuple(
    np.dtype(name)
    for name in (
        ("bool", "<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8")
        + ("<f2", "<f4", "<f8", "<c8", "<c16")
    )
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NOTHING = np.empty(0, np.uint8)


class BadFrame(ValueError):
    """Bytes that are no frame."""


class Kind(IntEnum):
    """What a frame is for."""

    ALL_REDUCE = 1
    """A rank's part, whole."""
    SCATTER = 2
    """The piece of a rank's part that the receiver sums."""
    SUM = 3
    """The piece of the sum that the sender made."""
    BROADCAST = 4
    GATHER = 5
    WAITING = 6
    """The sender waits in this exchange for the receiver; no elements."""
    ABANDON = 7
    """The sender takes no part in this exchange; the text says why."""
    LEAVE = 8
    """The sender takes no part in anything any more; the text says why."""


_KINDS = {int(kind): kind for kind in Kind}
_WHOLE = frozenset((Kind.ALL_REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.ABANDON))
_ZEROS = (0,) * 8
NAMES = {
    Kind.ALL_REDUCE: "all-reduce",
    Kind.BROADCAST: "broadcast",
    Kind.GATHER: "gather",
    Kind.ABANDON: "exchange",
}
"""What exchanges are called."""


class Frame(NamedTuple):
    """One message between two ranks; the module's docstring says what the fields are.

    Attributes:
        values: the elements that the frame carries, flat.
    """

    kind: Kind
    operation: Kind
    rank: int
    epoch: int = 0
    sequence: int = 0
    ticket: int = 0
    step: int = -1
    layer: int = -1
    root: int = 0
    shape: tuple[int, ...] = ()
    values: Array = NOTHING
    text: str = ""

    @property
    def array(self) -> Array:
        """The values in their shape, for a frame that carries all of them."""
        return self.values.reshape(self.shape)

    def describe(self) -> str:
        """The exchange that it belongs to, in words."""
        what = f"{NAMES[self.operation]} #{self.ticket}"
        if self.operation is Kind.ALL_REDUCE:
            what += f" of {self.values.dtype} {self.shape}"
        else:
            what += f" with root {self.root}"
        return f"{what} (step {self.step}, layer {self.layer}) {self.text}".rstrip()


def pack(frame: Frame) -> bytes | Array:
    """The bytes of a frame: a copy, so that the values may be changed afterwards.

    Raises:
        TransportError: an array of another type than numbers, or of more than 8 dimensions.
    """
    kind, operation, rank, epoch, sequence, ticket, step, layer, root, shape, values, text = frame
    code = _CODES.get(values.dtype)
    if code is None or len(shape) > DIMENSIONS or max(shape, default=0) >> 32:
        raise TransportError(f"an array of {values.dtype} {shape} cannot be sent")
    said = cut(text).encode()
    count, nbytes = values.size, values.nbytes
    head = HEADER.pack(
        MAGIC, VERSION, kind, code, len(shape), epoch, sequence, ticket, step, layer, count, rank, root, len(said),
        operation, *shape, *_ZEROS[len(shape) :],
    )  # fmt: skip
    if nbytes <= JOINED_UP_TO:
        return b"".join((head, values.view(np.uint8).data, said))
    packed = np.empty(len(head) + nbytes + len(said), np.uint8)
    packed[: len(head)] = np.frombuffer(head, np.uint8)
    packed[len(head) : len(head) + nbytes] = values.view(np.uint8)
    packed[len(head) + nbytes :] = np.frombuffer(said, np.uint8)
    return packed


def unpack(data: Any) -> Frame:
    """The frame that bytes are; its values lie in them.

    Raises:
        BadFrame: they are none: too short or too long, of another version, with fields that nobody writes.
    """
    total = len(data)
    if total < HEADER.size:
        raise BadFrame(f"{total} bytes, less than a header")
    magic, version, kind_code, code, dimensions, *numbers = HEADER.unpack_from(data)
    epoch, sequence, ticket, step, layer, count, rank, root, said, operation_code, *lengths = numbers
    if magic != MAGIC:
        raise BadFrame(f"it begins with {magic!r}")
    if version != VERSION:
        raise BadFrame(f"version {version} of the wire format; this is version {VERSION}")
    kind, operation = _KINDS.get(kind_code), _KINDS.get(operation_code)
    if kind is None or operation not in NAMES or code >= len(DTYPES) or dimensions > DIMENSIONS:
        raise BadFrame(f"kind {kind_code} of {operation_code}, dtype {code}, {dimensions} dimensions")
    dtype = DTYPES[code]
    shape = tuple(lengths[:dimensions])
    if count > prod(shape):
        raise BadFrame(f"{count} elements of an array {shape}")
    if kind in _WHOLE and count != prod(shape):
        raise BadFrame(f"{count} of the elements of an array {shape}")
    if said > TEXT_BYTES or total != HEADER.size + count * dtype.itemsize + said:
        raise BadFrame(f"{total} bytes for {count} of {dtype} and {said} of text")
    values = np.frombuffer(data, dtype, count, HEADER.size)
    text = str(memoryview(data)[total - said :], "utf-8", "replace") if said else ""
    return Frame(kind, operation, rank, epoch, sequence, ticket, step, layer, root, shape, values, text)


def cut(text: str) -> str:
    """A text that fits into a frame; of different long texts, different ones."""
    if len(text) * 4 <= TEXT_BYTES or len(text.encode()) <= TEXT_BYTES:
        return text
    digest = f" … {blake2b(text.encode(), digest_size=16).hexdigest()}"
    return text.encode()[: TEXT_BYTES - len(digest.encode())].decode(errors="ignore") + digest
