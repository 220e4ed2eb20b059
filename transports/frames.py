"""The wire format of frames: a fixed header, a text and the elements of an array. Nothing is ever unpickled.

The header is little-endian, 96 bytes. The text (UTF-8, padded with zeros to a multiple of 16 bytes) and the elements (C
order) follow:

    magic       4 bytes   "MoEx"
    version     1         VERSION
    kind        1         Kind: the purpose of the frame
    rank        2         the sender
    epoch       8         the number of the period in which the same ranks run together
    sequence    8         the number of the exchange between these ranks, from 0
    ticket      8         Exchange.ticket
    step        8         Exchange.step
    layer       8         Exchange.layer
    elements    8         number of elements that follow: the whole array, or a piece of it
    operation   1         the Kind that names the exchange: ALL_REDUCE, BROADCAST or GATHER; or ABANDON
    dtype       1         the index of the elements' dtype in DTYPES
    dimensions  1         number of dimensions of the whole array, 0 to 8
    zero        1
    root        2         the root of a broadcast or a gather
    text bytes  2         length of the text without the padding
    shape       8 x 4     of the whole array; zero beyond the dimensions
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from moesched.errors import TransportError

if TYPE_CHECKING:
    from moesched.seams import Array

MAGIC = b"MoEx"
VERSION = 2
_SENDER = struct.Struct("<4sBBH")
_PLACE = struct.Struct("<QQqqq")
_SUBJECT = struct.Struct("<QBBBxHH8I")
HEADER = struct.Struct("<" + "".join(part.format.lstrip("<") for part in (_SENDER, _PLACE, _SUBJECT)))
SENDER_BYTES = _SENDER.size
"""Number of bytes at the start of a header that differ between the ranks of an exchange."""

DIMENSIONS = 8
"""Largest number of dimensions of an array."""
TEXT_BYTES = 4096
"""Largest number of bytes of a text; a longer one is cut, and ends in a digest of the whole."""

TEXT_UNIT = 16
"""Bytes to a multiple of which texts are padded."""

JOINED_UP_TO = 64 * 1024
"""Most bytes of a frame that ZeroMQ copies; larger ones are sent from the memory that they are put together in."""

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
    """Raised by `unpack` for bytes that are not a valid frame."""


class Kind(IntEnum):
    """The purpose of a frame."""

    ALL_REDUCE = 1
    """The whole part of a rank in an all-reduce."""
    SCATTER = 2
    """The piece of a rank's part that the receiver is to sum."""
    SUM = 3
    """The piece of the sum that the sender computed."""
    BROADCAST = 4
    GATHER = 5
    WAITING = 6
    """The sender waits in this exchange for the receiver; no elements."""
    ABANDON = 7
    """The sender takes no part in this exchange; the text is the reason."""
    LEAVE = 8
    """The sender takes no part in any later exchange; the text is the reason."""
    HERE = 9
    """A greeting: the receiver can reach the sender on this connection. It belongs to no exchange."""

    __hash__ = int.__hash__  # that of enumerations is written in Python, and each exchange needs three


_KINDS = {int(kind): kind for kind in Kind}
PIECES = frozenset((Kind.SCATTER, Kind.SUM))
"""Frames that carry a piece of an array."""

_WHOLE = frozenset((Kind.ALL_REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.ABANDON))
NAMES = {
    Kind.ALL_REDUCE: "all-reduce",
    Kind.BROADCAST: "broadcast",
    Kind.GATHER: "gather",
    Kind.ABANDON: "exchange",
}
"""The names of operations in messages for users."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A message between two ranks; the module's docstring describes the fields.

    Attributes:
        text: the exchange's signature; in ABANDON, the reason why a rank gave up.
        values: the elements that the frame carries, flat; in ABANDON, the numbers of ranks that were lost.
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
    text: str = ""
    values: Array = NOTHING

    def names_the_same_as(self, other: Frame) -> bool:
        """Return True if two frames belong to one exchange; in an all-reduce, shapes and dtypes must be equal, too."""
        mine = (self.ticket, self.step, self.layer, self.root, self.operation, cut(self.text))
        if mine != (other.ticket, other.step, other.layer, other.root, other.operation, cut(other.text)):
            return False
        alike = self.shape == other.shape and self.values.dtype == other.values.dtype
        return alike or self.operation is not Kind.ALL_REDUCE

    def describe(self) -> str:
        """Return a description of the frame's exchange in words, for messages."""
        what = f"{NAMES[self.operation]} #{self.ticket}"
        if self.operation is Kind.ALL_REDUCE:
            what += f" of {self.values.dtype} {self.shape}"
        else:
            what += f" with root {self.root}"
        return f"{what} (step {self.step}, layer {self.layer}) {self.text}".rstrip()


def sender(kind: Kind, rank: int) -> bytes:
    """Return the first bytes of a frame's header: magic, version, kind and the rank that sends the frame."""
    return _SENDER.pack(MAGIC, VERSION, kind, rank)


def common(
    place: tuple[int, ...], operation: Kind, root: int, values: Array, shape: tuple[int, ...], text: str
) -> bytes:
    """Return the bytes of a frame after those of `sender`: the rest of the header, and the text.

    In an all-reduce of whole arrays these bytes are the same on all ranks.

    Args:
        place: epoch, sequence, ticket, step and layer.
        operation: ALL_REDUCE, BROADCAST, GATHER or ABANDON.
        root: rank of the root of a broadcast or a gather.
        values: the elements to send.
        shape: shape of the whole array.

    Raises:
        TransportError: the dtype is not in DTYPES, or the array has more than 8 dimensions or too large ones.
    """
    said = text.encode()
    if len(said) > TEXT_BYTES:
        said = cut(text).encode()
    subject = _subject(operation, root, values.dtype, values.size, shape, len(said))
    return b"".join((_PLACE.pack(*place), subject, said, bytes(-len(said) % TEXT_UNIT)))


@lru_cache(256)
def _subject(
    operation: Kind, root: int, dtype: np.dtype[Any], elements: int, shape: tuple[int, ...], said: int
) -> bytes:
    """Return the end of a header, from the number of elements to the shape; results are cached, as exchanges repeat.

    Args:
        said: length of the text in bytes.
    """
    code = _CODES.get(dtype)
    if code is None or len(shape) > DIMENSIONS or max(shape, default=0) >> 32:
        raise TransportError(f"an array of {dtype} {shape} cannot be sent")
    lengths = (*shape, *(0,) * (DIMENSIONS - len(shape)))
    return _SUBJECT.pack(elements, operation, code, len(shape), root, said, *lengths)


def common_of_parts(place: tuple[int, ...], part: Array, text: str) -> bytes:
    """Return the same bytes as `common`, but faster, for an all-reduce of the whole `part`. Raises as `common`."""
    return _PLACE.pack(*place) + _subject_of_parts(part.dtype, part.shape, text)


@lru_cache(256)
def _subject_of_parts(dtype: np.dtype[Any], shape: tuple[int, ...], text: str) -> bytes:
    """Return the bytes that follow the place (epoch to layer) in `common_of_parts`; results are cached."""
    said = cut(text).encode()
    subject = _subject(Kind.ALL_REDUCE, 0, dtype, prod(shape), shape, len(said))
    return b"".join((subject, said, bytes(-len(said) % TEXT_UNIT)))


def pack(frame: Frame) -> bytes | memoryview:
    """Encode a frame to bytes; the values are copied, so that the array may change afterwards. Raises as `common`."""
    place = frame.epoch, frame.sequence, frame.ticket, frame.step, frame.layer
    after = common(place, frame.operation, frame.root, frame.values, frame.shape, frame.text)
    return joined(sender(frame.kind, frame.rank), after, frame.values)


def joined(first: bytes, after: bytes, values: Array) -> bytes | memoryview:
    """Join the bytes of a frame: `first` from `sender`, `after` from `common`, and contiguous values."""
    if values.nbytes <= JOINED_UP_TO:
        return b"".join((first, after, values.data))
    before = first + after
    packed = np.empty(len(before) + values.nbytes, np.uint8)
    packed[: len(before)] = np.frombuffer(before, np.uint8)
    packed[len(before) :] = values.reshape(-1).view(np.uint8)
    return packed.data


def unpack(data: Any) -> Frame:
    """Decode a frame from bytes; the frame's values are a view of these bytes.

    Raises:
        BadFrame: the length is wrong, the version differs, or a field is invalid.
    """
    total = len(data)
    if total < HEADER.size:
        raise BadFrame(f"{total} bytes, less than a header")
    magic, version, kind_code, rank, *numbers = HEADER.unpack_from(data)
    epoch, sequence, ticket, step, layer, count, operation_code, code, dimensions, root, said, *lengths = (
        numbers
    )
    if magic != MAGIC:
        raise BadFrame(f"it begins with {magic!r}")
    if version != VERSION:
        raise BadFrame(f"version {version} of the wire format; this is version {VERSION}")
    kind, operation = _KINDS.get(kind_code), _KINDS.get(operation_code)
    if kind is None or operation not in NAMES or code >= len(DTYPES) or dimensions > DIMENSIONS:
        raise BadFrame(f"kind {kind_code} of {operation_code}, dtype {code}, {dimensions} dimensions")
    dtype, shape = DTYPES[code], tuple(lengths[:dimensions])
    if kind is Kind.ABANDON and dtype.kind not in "iu":
        raise BadFrame(f"the ranks that were lost, as {dtype}")
    if count > prod(shape) or (kind in _WHOLE and count != prod(shape)):
        raise BadFrame(f"{count} elements of an array {shape}")
    start = HEADER.size + _padded(said)
    if said > TEXT_BYTES or total != start + count * dtype.itemsize:
        raise BadFrame(f"{total} bytes for {said} of text and {count} of {dtype}")
    text = str(memoryview(data)[HEADER.size : HEADER.size + said], "utf-8", "replace")
    values = np.frombuffer(data, dtype, count, start)
    return Frame(kind, operation, rank, epoch, sequence, ticket, step, layer, root, shape, text, values)


def cut(text: str) -> str:
    """Shorten a text that does not fit into a frame; its end becomes a digest, so different texts stay different."""
    if len(text) * 4 <= TEXT_BYTES or len(text.encode()) <= TEXT_BYTES:
        return text
    digest = f" … {blake2b(text.encode(), digest_size=16).hexdigest()}"
    return text.encode()[: TEXT_BYTES - len(digest.encode())].decode(errors="ignore") + digest


def _padded(nbytes: int) -> int:
    return -(-nbytes // TEXT_UNIT) * TEXT_UNIT
