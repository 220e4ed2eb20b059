"""Storage formats of single tensors: how a row lies in its file, in memory, and where a kernel reads it.

A plain format is a dtype. In a coded one, groups of weights are blocks of bytes: a weight is its code, a small whole
number, times the scale of its group, plus the group's minimum where the format has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from moesched.models.layers import Shape


class Codes(NamedTuple):
    """The codes of a block.

    Attributes:
        bits: 8 are a signed byte each; 4 are halves of bytes, the lower halves of all bytes before the upper ones.
        offset: of the first in the block, in bytes.
        zero: is subtracted from what is stored.
        largest: the code of the weight furthest from 0, by which a writer chooses the scale; below 0, weights of that
            sign have one code more, and the scale has the sign that gives the weight this code.
    """

    bits: Literal[4, 8]
    offset: int
    zero: int
    largest: int


class StoredFormat(NamedTuple):
    """A storage format of a tensor.

    Attributes:
        group: weights of a block; rows are whole blocks.
        block_bytes: bytes of a block.
        codes: None in a plain format, which has a dtype's number for each weight.
        scale, minimum: offsets of these float16 numbers in a block, in bytes; a format without a minimum has None.
        in_files: the dtype of its rows in safetensors: those of a coded format are bytes.
    """

    name: str
    group: int
    block_bytes: int
    codes: Codes | None = None
    scale: int = 0
    minimum: int | None = None
    in_files: str = "U8"

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a block over its weights."""
        return self.block_bytes / self.group

    def fits(self, shape: Shape) -> bool:
        """Test whether rows of a tensor are whole blocks; a vector stays plain."""
        return len(shape) > 1 and shape[-1] % self.group == 0

    def row_bytes(self, weights: int) -> int:
        """Bytes of a row of that many weights."""
        return weights // self.group * self.block_bytes

    def shape_in_files(self, shape: Shape) -> Shape:
        """The shape of a tensor in safetensors."""
        return shape if self.codes is None else (*shape[:-1], self.row_bytes(shape[-1]))


_FORMATS = (
    StoredFormat("float32", 1, 4, in_files="F32"),
    StoredFormat("bfloat16", 1, 2, in_files="BF16"),
    StoredFormat("float16", 1, 2, in_files="F16"),
    StoredFormat("q8_0", 32, 34, Codes(bits=8, offset=2, zero=0, largest=127)),
)

STORED_FORMATS: Mapping[str, StoredFormat] = MappingProxyType({each.name: each for each in _FORMATS})
"""All formats, by name: plain ones as dtypes are called, coded ones as in files of llama.cpp."""

PLAIN = tuple(each.name for each in _FORMATS if each.codes is None)
CODED = tuple(each.name for each in _FORMATS if each.codes is not None)
