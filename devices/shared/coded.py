"""Row blocks of matrices in a coded storage format: their bytes, and what the bytes say."""

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
    """The groups of some rows: N rows, G groups of a row, g weights of a group; all float32.

    Attributes:
        minimums_NG: None in a format without minimums.
    """

    codes_NGg: Tensor
    scales_NG: Tensor
    minimums_NG: Tensor | None


class Coded:
    """Rows as they are stored.

    Args:
        raw_NB: their bytes, uint8.
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

    def copied(self, device: torch.device) -> Coded:
        """The rows in memory of their own on a device."""
        return Coded(self.raw_NB.to(device, copy=True), self.format)

    def to(self, device: torch.device) -> Coded:
        """The rows on a device; no copy if they are there."""
        return Coded(self.raw_NB.to(device), self.format)

    def chunk(self, count: int) -> Sequence[Coded]:
        """The rows in at most `count` equal parts."""
        return [Coded(part, self.format) for part in self.raw_NB.chunk(count)]

    def split(self, rows: int) -> Sequence[Coded]:
        """The rows in parts of that many, the last of which may have fewer."""
        return [Coded(part, self.format) for part in self.raw_NB.split(rows)]

    def take(self, rows_N: Tensor) -> Coded:
        """The rows of these numbers."""
        return Coded(self.raw_NB.index_select(0, rows_N), self.format)

    def groups(self) -> Groups:
        """Read codes, scales and minimums."""
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
        """The weights (N, D), rounded to a dtype."""
        codes_NGg, scales_NG, minimums_NG = self.groups()
        weights_NGg = codes_NGg * scales_NG[..., None]
        if minimums_NG is not None:
            weights_NGg += minimums_NG[..., None]
        return weights_NGg.flatten(1).to(dtype)


Block = Tensor | Coded
"""Rows of a matrix, plain or coded."""


def rows_of(block: Block) -> Tensor:
    """The tensor that has the rows of a block, as bytes where they are coded."""
    return block.raw_NB if isinstance(block, Coded) else block


def plain_block(block: Block, dtype: torch.dtype) -> Tensor:
    """The weights of a block; a plain one is returned as it is."""
    return block.plain(dtype) if isinstance(block, Coded) else block


def require_plain(config: ModelConfig, device: str) -> None:
    """Raise BadInput for a model with coded weights, on a device that has no kernel for them."""
    if formats := config.coded_formats:
        raise BadInput(
            f"{config.name}: device {device} has no kernel for weights in {', '.join(formats)}: use --device torch"
        )


def _codes(blocks_NBb: Tensor, codes: Codes, count: int) -> Tensor:
    """The codes of each block, float32: (N, B, count)."""
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
    """A table of values on a device, float32; it is brought there once."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _pieces(blocks_NBb: Tensor, packed: Bits, count: int) -> Tensor:
    """The bits of each weight: (N, B, count), uint8."""
    raw_NBb = _bytes_at(blocks_NBb, packed.offset, count * packed.bits // 8)
    if packed.bits == 8:
        return raw_NBb
    runs_NBrs = raw_NBb.unflatten(-1, (-1, packed.span))
    mask = (1 << packed.bits) - 1
    shifted = [runs_NBrs >> shift & mask for shift in range(0, 8, packed.bits)]
    return torch.stack(shifted, dim=-2).flatten(-3)


def _six_bits(raw_NBb: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of scales and those of minimums, (N, B, 8) each.

    Of the first four groups, scales are in four bytes and minimums in the next four. The last four bytes have the
    lower halves of the other scales, and above them of the other minimums, whose last two bits are the highest ones of
    the first eight bytes.
    """
    scales, minimums, lower = raw_NBb.split(4, dim=-1)
    others = (lower & 15 | scales >> 6 << 4, lower >> 4 | minimums >> 6 << 4)
    of_scales, of_minimums = (
        torch.cat([first & 63, rest], dim=-1) for first, rest in zip((scales, minimums), others, strict=True)
    )
    return of_scales, of_minimums


def _numbers(blocks_NBb: Tensor, offset: int, stored: StoredFormat) -> Tensor:
    """The number at an offset of each block, float32: (N, B, 1). The exponent 255 is none (OCP MX, E8M0)."""
    if stored.number == "exponent":
        exponents_NB1 = _bytes_at(blocks_NBb, offset, 1).int()
        numbers_NB1 = torch.ldexp(torch.ones_like(exponents_NB1, dtype=torch.float32), exponents_NB1 - 128)
        return numbers_NB1.masked_fill(exponents_NB1 == 255, torch.nan)
    return _bytes_at(blocks_NBb, offset, 2).contiguous().view(torch.float16).float()


def _bytes_at(blocks_NBb: Tensor, offset: int, count: int) -> Tensor:
    return blocks_NBb[..., offset : offset + count]
