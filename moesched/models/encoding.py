"""Encodes weights in a coded storage format, each group by the format's rule of rounding to the nearest code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesched.models.stored_formats import StoredFormat


def encoded(weights: npt.NDArray[np.float32], stored: StoredFormat) -> npt.NDArray[np.uint8]:
    """The blocks of weights, one after the other, as bytes.

    Args:
        weights: 1-D, whole groups.
        stored: coded, without a minimum.
    """
    codes = stored.codes
    assert codes is not None and stored.minimum is None, "it is a format that models are written in"
    groups = weights.reshape(-1, stored.group)
    scales = _furthest(groups, signed=codes.largest < 0) / np.float32(codes.largest)
    steps = scales[:, None]
    rounded = np.floor(
        np.divide(groups, steps, out=np.zeros_like(groups), where=steps != 0) + np.float32(0.5)
    )
    most = 2 ** (codes.bits - 1) - 1
    numbers = (np.clip(rounded, -most - 1, most) + codes.zero).astype(np.int8).view(np.uint8)
    blocks = np.zeros((len(groups), stored.block_bytes), np.uint8)
    blocks[:, stored.scale : stored.scale + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    packed = numbers if codes.bits == 8 else _halves(numbers)
    blocks[:, codes.offset : codes.offset + packed.shape[1]] = packed
    return blocks.reshape(-1)


def _furthest(groups: npt.NDArray[np.float32], *, signed: bool) -> npt.NDArray[np.float32]:
    """The weight of each group that is furthest from 0, or its magnitude."""
    where = np.abs(groups).argmax(axis=1, keepdims=True)
    furthest = np.take_along_axis(groups, where, axis=1)[:, 0]
    return furthest if signed else np.abs(furthest)


def _halves(numbers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Numbers below 16, two in a byte: the first half of them in the lower bits."""
    middle = numbers.shape[1] // 2
    halves: npt.NDArray[np.uint8] = numbers[:, :middle] | (numbers[:, middle:] << np.uint8(4))
    return halves
