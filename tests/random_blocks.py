"""Random bytes of coded rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesched.models.stored_formats import StoredFormat


def random_blocks(stored: StoredFormat, rows: int, weights: int) -> npt.NDArray[np.uint8]:
    """Rows of any bytes, but for scales and minimums, by which weights are finite: (rows, bytes)."""
    random = np.random.default_rng(7)
    raw = random.integers(0, 256, (rows, weights // stored.block, stored.block_bytes), dtype=np.uint8)
    if stored.number == "exponent":
        raw[..., stored.scale] %= 250
    else:
        for offset in [stored.scale] if stored.minimum is None else [stored.scale, stored.minimum]:
            numbers = random.normal(size=(*raw.shape[:2], 1)).astype(np.float16)
            raw[..., offset : offset + 2] = numbers.view(np.uint8)
    return raw.reshape(rows, -1)
