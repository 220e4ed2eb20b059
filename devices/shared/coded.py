"""Rows of matrices in a quantised ("coded") storage format: their bytes, and the decoding into numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.stored_formats import Bits, Codes, StoredFormat

Tensor = torch.Tensor


class Groups(NamedTuple):
    """The codes, scales and minimums of N quantised rows, float32; a weight is code * scale + minimum.

    Each row has G groups of g weights; a group has one scale and one minimum.

    Attributes:
        codes_NGg: the code of each weight.
        scales_NG: the scale of each group.
        minimums_NG: the minimum of each group; None in a format without minimums.
    """

    codes_NGg: Tensor
    scales_NG: Tensor
    minimums_NG: Tensor | None


class CodedRows:
    """Rows of a matrix in a quantised format, as they are stored.

    Args:
        raw_NB: B bytes for each of N rows, uint8.
        stored: the storage format of the rows.
    """

    __slots__ = ("format", "raw_NB")

    def __init__(self, raw_NB: Tensor, stored: StoredFormat) -> None:
        self.raw_NB = raw_NB
        self.format = stored

    def __len__(self) -> int:
        return len(self.raw_NB)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.raw_NB.nbytes

    def copied(self, device: torch.device) -> CodedRows:
        """Copy the rows to new memory on a device."""
        return CodedRows(self.raw_NB.to(device, copy=True), self.format)

    def to(self, device: torch.device) -> CodedRows:
        """Return the rows on a device; they are copied only if they are not on that device already."""
        return CodedRows(self.raw_NB.to(device), self.format)

    def chunk(self, count: int) -> Sequence[CodedRows]:
        """Cut the rows into at most `count` parts of equal size; the last part may have fewer rows."""
        return [CodedRows(part, self.format) for part in self.raw_NB.chunk(count)]

    def split(self, rows: int) -> Sequence[CodedRows]:
        """Cut the rows into parts of `rows` rows; the last part may have fewer."""
        return [CodedRows(part, self.format) for part in self.raw_NB.split(rows)]

    def take(self, rows_N: Tensor) -> CodedRows:
        """Copy the rows that have these indices."""
        return CodedRows(self.raw_NB.index_select(0, rows_N), self.format)

    def groups(self) -> Groups:
        """Unpack the codes, scales and minimums of all groups."""
        stored = self.format
        assert stored.codes is not None, "the format is coded"
        blocks_NBb = self.raw_NB.view(len(self), -1, stored.block_bytes)
        codes_NGg = _codes(blocks_NBb, stored.codes, stored.block).view(len(self), -1, stored.group)
        scales_NB1 = _numbers(blocks_NBb, stored.scale, stored)
        minimums_NB1 = None if stored.minimum is None else _numbers(blocks_NBb, stored.minimum, stored)
        if stored.factors is None:
            return Groups(
                codes_NGg, scales_NB1[..., 0], None if minimums_NB1 is None else minimums_NB1[..., 0]
            )
        if stored.factors.packing == "bytes":
            factors_NBf = _bytes_at(blocks_NBb, stored.factors.offset, stored.groups).view(torch.int8)
            return Groups(codes_NGg, (scales_NB1 * factors_NBf).flatten(1), None)
        assert minimums_NB1 is not None, "the packing has factors of minimums"
        of_scales_NBf, of_minimums_NBf = _six_bits(_bytes_at(blocks_NBb, stored.factors.offset, 12))
        minimums_NBf = (minimums_NB1 * of_minimums_NBf).neg_()
        return Groups(codes_NGg, (scales_NB1 * of_scales_NBf).flatten(1), minimums_NBf.flatten(1))

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Decode the rows into weights (N, D), rounded to a dtype."""
        codes_NGg, scales_NG, minimums_NG = self.groups()
        weights_NGg = codes_NGg * scales_NG[..., None]
        if minimums_NG is not None:
            weights_NGg += minimums_NG[..., None]
        return weights_NGg.flatten(1).to(dtype)


Block = Tensor | CodedRows
"""Some rows of a matrix: a tensor of numbers, or `CodedRows` if they are quantised."""


def rows_of(block: Block) -> Tensor:
    """Return a block (rows of a matrix) as a tensor: numbers as they are, quantised rows as bytes (uint8)."""
    return block.raw_NB if isinstance(block, CodedRows) else block


def plain_block(block: Block, dtype: torch.dtype) -> Tensor:
    """Decode a block (rows of a matrix) to a dtype if it is quantised; otherwise return the block itself."""
    return block.plain(dtype) if isinstance(block, CodedRows) else block


def require_plain(config: ModelConfig, device: str) -> None:
    """Raise BadInput if a model has quantised weights; `device` names a device that has no kernels for them."""
    if formats := config.coded_formats:
        raise BadInput(
            f"{config.name}: device {device} has no kernel for weights in {', '.join(formats)}: use --device torch"
        )


def _codes(blocks_NBb: Tensor, codes: Codes, count: int) -> Tensor:
    """Unpack the codes of N rows of B blocks each: (N, B, count), float32.

    Args:
        codes: the packing of the codes in a block.
        count: number of codes in a block.
    """
    stored_NBc = _pieces(blocks_NBb, codes.low, count)
    if codes.low.bits == 8:
        return stored_NBc.view(torch.int8).float()
    if codes.high is not None:
        stored_NBc |= _pieces(blocks_NBb, codes.high, count) << codes.low.bits
    if codes.values:
        return _on(stored_NBc.device, codes.values)[stored_NBc.int()]
    codes_NBc = stored_NBc.float()
    return codes_NBc.sub_(codes.zero) if codes.zero else codes_NBc


@cache
def _on(device: torch.device, values: tuple[int, ...]) -> Tensor:
    """Return a float32 tensor of the values that codes stand for, on a device; it is copied there only once."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _pieces(blocks_NBb: Tensor, packed: Bits, count: int) -> Tensor:
    """Unpack the lower or the upper bits of all codes of N rows of B blocks each: (N, B, count), uint8.

    Args:
        packed: the bits of each code to unpack, and their place in a block.
        count: number of codes in a block.
    """
    raw_NBb = _bytes_at(blocks_NBb, packed.offset, count * packed.bits // 8)
    if packed.bits == 8:
        return raw_NBb
    runs_NBrs = raw_NBb.unflatten(-1, (-1, packed.span))
    mask = (1 << packed.bits) - 1
    shifted = [runs_NBrs >> shift & mask for shift in range(0, 8, packed.bits)]
    return torch.stack(shifted, dim=-2).flatten(-3)


def _six_bits(raw_NBb: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 6-bit factors of each block's eight groups from 12 bytes; returns those of scales, and of minimums.

    Both results are uint8 tensors (N, B, 8). Bytes 0 to 3 are for scales, bytes 4 to 7 for minimums. The lower six bits
    of these bytes are the factors of groups 0 to 3; their upper two bits are the upper two bits of the factors of
    groups 4 to 7. The lower four bits of the factors of groups 4 to 7 are in bytes 8 to 11: those of scales in the
    lower half of each byte, those of minimums in the upper half.
    """
    scales, minimums, lower = raw_NBb.split(4, dim=-1)
    others = (lower & 15 | scales >> 6 << 4, lower >> 4 | minimums >> 6 << 4)
    of_scales, of_minimums = (
        torch.cat([first & 63, rest], dim=-1) for first, rest in zip((scales, minimums), others, strict=True)
    )
    return of_scales, of_minimums


def _numbers(blocks_NBb: Tensor, offset: int, stored: StoredFormat) -> Tensor:
    """Read the scale or minimum at a byte offset of each of B blocks: (N, B, 1), float32.

    The number is stored as float16, or as one byte e in the format E8M0, in which 255 is NaN, and e stands for
    2 ** (e - 127). Half of that is returned, 2 ** (e - 128), since the values of MXFP4 codes are doubled.
    """
    if stored.scale_encoding == "exponent":
        exponents_NB1 = _bytes_at(blocks_NBb, offset, 1).int()
        numbers_NB1 = torch.ldexp(torch.ones_like(exponents_NB1, dtype=torch.float32), exponents_NB1 - 128)
        return numbers_NB1.masked_fill(exponents_NB1 == 255, torch.nan)
    return _bytes_at(blocks_NBb, offset, 2).contiguous().view(torch.float16).float()


def _bytes_at(blocks_NBb: Tensor, offset: int, count: int) -> Tensor:
    return blocks_NBb[..., offset : offset + count]
