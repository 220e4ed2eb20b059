"""Storage formats of single tensors: the layout of a row in files, and in the memory that kernels read.

A plain format is a dtype. In a coded (quantised) format, a row is cut into blocks of bytes, and a block into groups of
weights. A weight is its code, a small whole number, times the scale of its group, plus the group's minimum where the
format has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from moesched.models.tensor_shapes import Shape


class Bits(NamedTuple):
    """The place of the weights' codes in a block, or of only the lower or the upper bits of the codes.

    The codes are stored in runs of `span` bytes; a run has the codes of span * 8 / bits weights. In byte i of a run,
    the lowest `bits` bits are of the run's weight i, the next higher `bits` bits of its weight span + i, and so on.

    Attributes:
        bits: number of bits of each code that are held here.
        offset: bytes from the start of the block to the first run.
        span: number of bytes of a run.
    """

    bits: Literal[1, 2, 4, 8]
    offset: int
    span: int


class Codes(NamedTuple):
    """The codes of a block: whole numbers of a few bits, one for each weight.

    Attributes:
        low: the place of the codes' lower bits; codes of 8 bits are signed.
        zero: the number that is subtracted from each stored code.
        largest: the code that the weight furthest from 0 gets when weights are encoded. The scale is about that weight
            divided by this code; if the code is negative, the scale has the opposite sign of the weight.
        high: the place of the upper bits, in a format that stores them apart; else None.
        values: for each stored code, the number that it stands for; empty if codes stand for themselves.
    """

    low: Bits
    zero: int
    largest: int
    high: Bits | None = None
    values: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.low.bits + (0 if self.high is None else self.high.bits)


class Factors(NamedTuple):
    """Whole numbers by which the scale and the minimum of a block are multiplied for each of its groups.

    Attributes:
        packing: "bytes": a signed byte for each scale; the format has no minimums. "six bits": 12 bytes with 6 bits for
            each of eight scales and eight minimums; such minimums are subtracted.
        offset: bytes from the start of the block to the first of these bytes.
    """

    packing: Literal["bytes", "six bits"]
    offset: int


class StoredFormat(NamedTuple):
    """A storage format of a tensor.

    Attributes:
        group: number of weights that share a scale.
        block_bytes: bytes of a block; each row has a whole number of blocks.
        codes: the codes of a block; None in a plain format, which stores each weight as a number of a dtype.
        scale, minimum: offsets of scale and minimum in a block, in bytes; `minimum` is None in a format without them.
        scale_encoding: form of scale and minimum: float16, or a byte e that stands for 2 ** (e - 128).
        groups: number of groups of a block.
        factors: the factors of a block's groups; None where a block is one group.
        in_files: the dtype of rows in safetensors files; "U8", bytes, in coded formats.
    """

    name: str
    group: int
    block_bytes: int
    codes: Codes | None = None
    scale: int = 0
    minimum: int | None = None
    scale_encoding: Literal["float16", "exponent"] = "float16"
    groups: int = 1
    factors: Factors | None = None
    in_files: str = "U8"

    @property
    def block(self) -> int:
        """Number of weights of a block."""
        return self.group * self.groups

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a block, divided by its number of weights."""
        return self.block_bytes / self.block

    def fits(self, shape: Shape) -> bool:
        """Test whether each row of a tensor of this shape has a whole number of blocks; False for a vector."""
        return len(shape) > 1 and shape[-1] % self.block == 0

    def row_bytes(self, weights: int) -> int:
        """Return the bytes of a row of `weights` weights."""
        return weights // self.block * self.block_bytes

    def shape_in_files(self, shape: Shape) -> Shape:
        """Return a tensor's shape in safetensors files; its last axis counts bytes, not weights, in a coded format."""
        return shape if self.codes is None else (*shape[:-1], self.row_bytes(shape[-1]))


_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of the 4-bit format of MXFP4 (e2m1)."""

_FORMATS = (
    StoredFormat("float32", 1, 4, in_files="F32"),
    StoredFormat("bfloat16", 1, 2, in_files="BF16"),
    StoredFormat("float16", 1, 2, in_files="F16"),
    StoredFormat("q8_0", 32, 34, Codes(Bits(8, 2, 32), zero=0, largest=127)),
    StoredFormat("q4_0", 32, 18, Codes(Bits(4, 2, 16), zero=8, largest=-8)),
    StoredFormat("q5_0", 32, 22, Codes(Bits(4, 6, 16), zero=16, largest=-16, high=Bits(1, 2, 1))),
    StoredFormat("q5_1", 32, 24, Codes(Bits(4, 8, 16), zero=0, largest=31, high=Bits(1, 4, 1)), minimum=2),
    StoredFormat(
        "q4_k",
        32,
        144,
        Codes(Bits(4, 16, 32), zero=0, largest=15),
        minimum=2,
        groups=8,
        factors=Factors("six bits", 4),
    ),
    StoredFormat(
        "q5_k",
        32,
        176,
        Codes(Bits(4, 48, 32), zero=0, largest=31, high=Bits(1, 16, 32)),
        minimum=2,
        groups=8,
        factors=Factors("six bits", 4),
    ),
    StoredFormat(
        "q6_k",
        16,
        210,
        Codes(Bits(4, 0, 64), zero=32, largest=-32, high=Bits(2, 128, 32)),
        scale=208,
        groups=16,
        factors=Factors("bytes", 192),
    ),
    StoredFormat(
        "mxfp4", 32, 17, Codes(Bits(4, 1, 16), zero=0, largest=12, values=_FP4), scale_encoding="exponent"
    ),
)

STORED_FORMATS: Mapping[str, StoredFormat] = MappingProxyType({each.name: each for each in _FORMATS})
"""All formats, by name: plain ones have the names of dtypes, coded ones their names in llama.cpp."""

PLAIN = tuple(each.name for each in _FORMATS if each.codes is None)
CODED = tuple(each.name for each in _FORMATS if each.codes is not None)


def nearest_by_bits(stored: str, among: Iterable[str]) -> str:
    """Choose the format, by name, that is nearest to the format `stored` in bits per weight."""
    bits = STORED_FORMATS[stored].bytes_per_weight
    return min(among, key=lambda name: abs(STORED_FORMATS[name].bytes_per_weight - bits))
