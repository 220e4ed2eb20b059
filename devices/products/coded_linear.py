"""Products with quantised ("coded") matrices: with exact sums on the CPU, with decoded rows on GPUs.

Shapes in names: T rows of x, D inputs in G groups of g, N outputs.

On the CPU, the inputs of a group are rounded to multiples of one unit. The unit is a power of two, chosen so that the
multiple of the group's largest input has 24 bits, or 14 bits for bfloat16 inputs, which have 8 significant bits. Each
multiple is divided into two pieces of half as many bits. Codes have at most 8 bits and groups at most 32 weights, so a
sum of codes times pieces has at most 24 bits: float32 holds it exactly, in any order of the terms. The sums of both
pieces are added and multiplied by the scale, and groups are added one after the other. So the bits of an output depend
only on its row of weights and its inputs, not on the number of rows or cores, on row blocks, or on the library that
multiplies. The native kernels give the same bits.
"""

from __future__ import annotations

import torch

from moesched.models.footprint import CODED_ROWS, CODED_TILE, UNPACKED_TILE

from ..shared.coded import CodedRows, Groups
from .plain_weights import plain_linear
from .team import one_core

Tensor = torch.Tensor

BITS = {torch.bfloat16: 14}
"""Bits of the largest input of a group, as a multiple of the unit, by dtype; pieces of 7 bits fit into signed bytes."""
MOST_BITS = 24
"""The same for other dtypes; float32 holds integers of 24 bits exactly."""
LEAST_EXPONENT = -100
"""Lower limit of the exponent from which a group's unit is computed, so that the unit is a normal number."""


class Pieces:
    """Inputs of a product, each cut into two pieces whose sum is the input rounded to its group's unit.

    Args:
        x_TD: the inputs.
        group: number of inputs in a group.

    Attributes:
        pieces_GRg: the upper pieces of all T rows, then their lower pieces: (G groups, R = 2 T, g inputs), float32.
        sums_GT1: the sum of each group's inputs, float32.
    """

    def __init__(self, x_TD: Tensor, group: int) -> None:
        x_GTg = x_TD.float().view(len(x_TD), -1, group).transpose(0, 1)
        exponents_GT1 = torch.frexp(x_GTg.abs().amax(dim=-1, keepdim=True)).exponent.clamp_(
            min=LEAST_EXPONENT
        )
        bits = BITS.get(x_TD.dtype, MOST_BITS)
        piece = 1 << bits // 2
        units_GT1 = torch.ldexp(x_GTg.new_ones(exponents_GT1.shape), exponents_GT1 - bits)
        multiples_GTg = (x_GTg / units_GT1).round_()
        upper_GTg = (multiples_GTg / piece).round_().mul_(piece)
        self.pieces_GRg = torch.cat([upper_GTg, multiples_GTg.sub_(upper_GTg)], dim=1)
        self.pieces_GRg *= units_GT1.repeat(1, 2, 1)
        upper_GT1, lower_GT1 = self.pieces_GRg.sum(dim=-1, keepdim=True).chunk(2, dim=1)
        self.sums_GT1 = upper_GT1 + lower_GT1

    def times(self, codes_GgN: Tensor) -> Tensor:
        """Sum the products of codes and inputs within each group of inputs: (G groups, T rows, N outputs), float32."""
        upper_GTN, lower_GTN = torch.bmm(self.pieces_GRg, codes_GgN).chunk(2, dim=1)
        return upper_GTN.add_(lower_GTN)


def coded_linear(x_TD: Tensor, block: CodedRows) -> Tensor:
    """Compute x @ W.T, (T, N), with quantised weights W and exact sums, rounded once to the dtype of x."""
    y_TN = x_TD.new_empty(len(x_TD), len(block))
    group = block.format.group
    with one_core():
        for x_tD, y_tN in zip(x_TD.split(CODED_ROWS), y_TN.split(CODED_ROWS), strict=True):
            pieces = Pieces(x_tD, group)
            outputs = max(1, CODED_TILE // max(x_tD.shape[1], 2 * x_tD.numel() // group))
            for part, y_tn in zip(block.split(outputs), y_tN.split(outputs, dim=1), strict=True):
                y_tn.copy_(_products(pieces, part.groups()))
    return y_TN


def unpacked_linear(x_TD: Tensor, block: CodedRows) -> Tensor:
    """Compute x @ W.T, (T, N), with quantised weights W; some rows of W at a time are decoded to the dtype of x."""
    rows = max(1, UNPACKED_TILE // x_TD.shape[1])
    parts = [plain_linear(x_TD, tile.plain(x_TD.dtype)) for tile in block.split(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _products(pieces: Pieces, groups: Groups) -> Tensor:
    codes_NGg, scales_NG, minimums_NG = groups
    sums_GTN = pieces.times(codes_NGg.permute(1, 2, 0)).mul_(scales_NG.T[:, None])
    if minimums_NG is not None:
        sums_GTN += pieces.sums_GT1 * minimums_NG.T[:, None]
    return _added(sums_GTN)


def _added(sums_GTN: Tensor) -> Tensor:
    """Add up the sums of all groups, one group after the other, overwriting them; returns (T, N)."""
    for number in range(1, len(sums_GTN)):
        sums_GTN[0] += sums_GTN[number]
    return sums_GTN[0]
