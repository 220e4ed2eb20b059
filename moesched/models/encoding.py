"""Encodes weights as blocks of a quantised storage format; each weight gets the nearest code.

A group's smallest and largest weight decide its scale. llama.cpp's tools search for better scales in the formats whose
scales are small integers times a unit per block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moesched.models.stored_formats import Bits, Codes, StoredFormat

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

MOST_FACTOR = {"bytes": 127, "six bits": 63}


def encoded(weights: Floats, stored: StoredFormat) -> Bytes:
    """Encode weights as blocks, and return the bytes of the blocks, one after the other.

    Args:
        weights: 1-D array of whole blocks.
        stored: a coded format.
    """
    codes = stored.codes
    assert codes is not None, "it is a coded format"
    groups = weights.reshape(-1, stored.group)
    lowest = _lowest(groups, stored)
    furthest = _furthest(groups - lowest[:, None], signed=codes.largest < 0)
    blocks = np.zeros((weights.size // stored.block, stored.block_bytes), np.uint8)
    if stored.scale_encoding == "exponent":
        scales = _write_exponents(blocks, stored.scale, furthest, codes.largest)
    else:
        scales, lowest = _write_scales(blocks, stored, furthest / np.float32(codes.largest), lowest)
    steps = scales[:, None]
    multiples = np.divide(groups - lowest[:, None], steps, out=np.zeros_like(groups), where=steps != 0)
    _write_codes(blocks, codes, _nearest(codes, multiples).reshape(len(blocks), -1))
    return blocks.reshape(-1)


def _lowest(groups: Floats, stored: StoredFormat) -> Floats:
    """Return, for each group, the weight that code 0 stands for.

    In a format without minimums, this weight is 0; in other formats, it is the least weight of the group. A format that
    stores minimums as multiples of a unit (`factors`) has no positive ones: there the weight is 0 if the whole group is
    positive.

    Args:
        groups: array (groups, weights of a group).
    """
    if stored.minimum is None:
        return np.zeros(len(groups), np.float32)
    lowest: Floats = groups.min(axis=1)
    return lowest if stored.factors is None else np.minimum(lowest, np.float32(0))


def _furthest(groups: Floats, *, signed: bool) -> Floats:
    """Return each group's weight that is furthest from 0: with its sign if `signed`, else its absolute value.

    Args:
        groups: array (groups, weights of a group).
    """
    where = np.abs(groups).argmax(axis=1, keepdims=True)
    furthest = np.take_along_axis(groups, where, axis=1)[:, 0]
    return furthest if signed else np.abs(furthest)


# ---------------------------------------------------------------- scales


def _write_scales(
    blocks: Bytes, stored: StoredFormat, scales: Floats, lowest: Floats
) -> tuple[Floats, Floats]:
    """Write the groups' scales and minimums into the blocks, rounded as the format stores them.

    Args:
        blocks: array (blocks, bytes of a block), which is changed.
        scales: scale of each group.
        lowest: minimum of each group.

    Returns:
        (scales, minimums), one of each per group, from which codes are computed: rounded in a format with integer
        factors, and otherwise as given.
    """
    if stored.factors is None:
        _write_float16(blocks, stored.scale, scales)
        if stored.minimum is not None:
            _write_float16(blocks, stored.minimum, lowest)
        return scales, lowest
    scales, of_scales = _factored(blocks, stored, stored.scale, scales)
    at = stored.factors.offset
    if stored.minimum is None:
        blocks[:, at : at + stored.groups] = of_scales.astype(np.int8).view(np.uint8)
        return scales, lowest
    minimums, of_minimums = _factored(blocks, stored, stored.minimum, -lowest)
    blocks[:, at : at + 12] = _six_bits(of_scales.astype(np.uint8), of_minimums.astype(np.uint8))
    return scales, -minimums


def _write_exponents(blocks: Bytes, offset: int, furthest: Floats, largest: int) -> Floats:
    """Write each block's scale as an exponent, and return the scales; a block is one group.

    A scale is a power of two: scale * largest code has the same binary exponent as the weight furthest from 0.

    Args:
        blocks: array (blocks, bytes of a block), which is changed.
        offset: place of the scale in a block, in bytes.
        furthest: absolute value of each group's weight that is furthest from 0.
        largest: the largest code.
    """
    exponents = np.frexp(furthest)[1] - np.frexp(np.float32(largest))[1]
    numbers = np.where(furthest == 0, 0, np.clip(exponents + 128, 0, 255))
    blocks[:, offset] = numbers
    scales: Floats = np.ldexp(np.float32(1), numbers - 128)
    return scales


def _write_float16(blocks: Bytes, offset: int, numbers: Floats) -> Floats:
    """Write one number per block as float16 at a byte offset of the block; return the numbers as rounded."""
    halves = numbers.astype(np.float16)
    blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
    return halves.astype(np.float32)


def _factored(
    blocks: Bytes, stored: StoredFormat, offset: int, numbers: Floats
) -> tuple[Floats, npt.NDArray[Any]]:
    """Write one float16 unit per block, and round each group's number to a whole multiple of its block's unit.

    Args:
        blocks: array (blocks, bytes of a block), which is changed.
        offset: place of the unit in a block, in bytes.
        numbers: scale or minimum of each group.

    Returns:
        (the rounded numbers, one of each group; the whole factors of the units, an array (blocks, groups of a block)).
    """
    assert stored.factors is not None, "it is a format with factors"
    most = MOST_FACTOR[stored.factors.packing]
    of_block = numbers.reshape(len(blocks), -1)
    units = _write_float16(blocks, offset, np.abs(of_block).max(axis=1) / np.float32(most))[:, None]
    factors = np.divide(of_block, units, out=np.zeros_like(of_block), where=units != 0)
    factors = np.clip(np.rint(factors), -most, most)
    return (factors * units).reshape(-1), factors


def _six_bits(scales: Bytes, minimums: Bytes) -> Bytes:
    """Pack six-bit factors of eight scales and of eight minimums into 12 bytes, as `Factors` describes.

    Args:
        scales, minimums: arrays (blocks, 8).

    Returns:
        Array (blocks, 12).
    """
    first = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scales, minimums)]
    packed: Bytes = np.concatenate([*first, scales[:, 4:] & 15 | minimums[:, 4:] << 4], axis=1)
    return packed


# ---------------------------------------------------------------- codes


def _nearest(codes: Codes, multiples: Floats) -> Bytes:
    """Return each weight's nearest code, in the form in which the format stores codes.

    Args:
        multiples: each weight minus the minimum of its group, divided by the scale of its group.
    """
    stored: Bytes
    if codes.values:
        values, first = np.unique(codes.values, return_index=True)
        stored = first.astype(np.uint8)[np.searchsorted((values[1:] + values[:-1]) / 2, multiples)]
        return stored
    least = -128 if codes.bits == 8 else -codes.zero
    rounded = np.clip(np.floor(multiples + np.float32(0.5)), least, least + 2**codes.bits - 1)
    stored = (rounded + codes.zero).astype(np.int16).astype(np.uint8)
    return stored


def _write_codes(blocks: Bytes, codes: Codes, numbers: Bytes) -> None:
    _write_bits(blocks, codes.low, numbers)
    if codes.high is not None:
        _write_bits(blocks, codes.high, numbers >> np.uint8(codes.low.bits))


def _write_bits(blocks: Bytes, packed: Bits, numbers: Bytes) -> None:
    """Write the lowest bits of each number into the blocks, in the order that `Bits` describes.

    Args:
        blocks: array (blocks, bytes of a block), which is changed.
        numbers: array (blocks, weights of a block).
    """
    pieces = 8 // packed.bits
    runs = (numbers & (1 << packed.bits) - 1).reshape(len(blocks), -1, pieces, packed.span)
    raw = np.bitwise_or.reduce([runs[:, :, piece] << piece * packed.bits for piece in range(pieces)])
    count = numbers.shape[1] // pieces
    blocks[:, packed.offset : packed.offset + count] = raw.reshape(len(blocks), count)
