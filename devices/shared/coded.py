"""Row blocks of matrices in a coded storage format: their bytes, and what the bytes say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.stored_formats import StoredFormat

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

    def copied(self) -> Coded:
        """The rows in memory of their own."""
        return Coded(self.raw_NB.clone(), self.format)

    def chunk(self, count: int) -> Sequence[Coded]:
        """The rows in at most `count` equal parts."""
        return [Coded(part, self.format) for part in self.raw_NB.chunk(count)]

    def take(self, rows_N: Tensor) -> Coded:
        """The rows of these numbers."""
        return Coded(self.raw_NB.index_select(0, rows_N), self.format)

    def groups(self) -> Groups:
        """Read codes, scales and minimums."""
        stored = self.format
        assert stored.codes is not None, "the format is coded"
        blocks_NGb = self.raw_NB.view(len(self), -1, stored.block_bytes)
        offset, bits = stored.codes.offset, stored.codes.bits
        bytes_NGb = blocks_NGb[..., offset : offset + stored.group * bits // 8]
        if bits == 8:
            codes_NGg = bytes_NGb.view(torch.int8).float()
        else:
            codes_NGg = torch.cat([bytes_NGb & 15, bytes_NGb >> 4], dim=-1).float()
        if stored.codes.zero:
            codes_NGg -= stored.codes.zero
        minimum = stored.minimum
        return Groups(
            codes_NGg,
            _numbers(blocks_NGb, stored.scale),
            None if minimum is None else _numbers(blocks_NGb, minimum),
        )

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The weights (N, D), rounded to a dtype."""
        codes_NGg, scales_NG, minimums_NG = self.groups()
        weights_NGg = codes_NGg * scales_NG[..., None]
        if minimums_NG is not None:
            weights_NGg += minimums_NG[..., None]
        return weights_NGg.flatten(1).to(dtype)


Block = Tensor | Coded
"""Rows of a matrix, plain or coded."""


def plain_block(block: Block, dtype: torch.dtype) -> Tensor:
    """The weights of a block; a plain one is returned as it is."""
    return block.plain(dtype) if isinstance(block, Coded) else block


def require_plain(config: ModelConfig, device: str) -> None:
    """Raise BadInput for a model with coded weights, on a device that has no kernel for them."""
    if formats := config.coded_formats:
        raise BadInput(
            f"{config.name}: device {device} has no kernel for weights in {', '.join(formats)}: use --device torch"
        )


def _numbers(blocks_NGb: Tensor, offset: int) -> Tensor:
    """A float16 number of each block."""
    return blocks_NGb[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0].float()
