"""Random weights, generated in memory as they are read: a model of any size without files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moesched.models.checkpoint import Blocks, Checkpoint, StoredTensor
from moesched.models.config import ITEM_BYTES, ModelConfig
from moesched.models.random_model import round_to_bfloat16
from moesched.models.tensors import tensor_shapes

STANDARD_DEVIATION = 0.02
REPEATED_BYTES = (1 << 26) + (1 << 20)
"""Random bytes at most, repeated endlessly. Pages have other sizes, so they begin at different offsets."""

ALIGNMENT = 4096
NORMS, MATRICES = Path("norms made in memory"), Path("matrices made in memory")


def random_checkpoint(config: ModelConfig, seed: int = 0) -> Checkpoint:
    """A checkpoint whose norms are 1 and whose matrices are normally distributed; reproducible from its seed."""
    ends = {NORMS: 0, MATRICES: 0}
    tensors: dict[str, StoredTensor] = {}
    for name, shape in tensor_shapes(config).items():
        file = NORMS if len(shape) == 1 else MATRICES
        nbytes = math.prod(shape) * ITEM_BYTES[config.dtype]
        tensors[name] = StoredTensor(file, ends[file], shape, config.dtype, nbytes)
        ends[file] += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Checkpoint(config, Path(), tensors, lambda path: _made(path, ends[path], config.dtype, seed))


def _made(path: Path, nbytes: int, dtype: str, seed: int) -> Blocks:
    items = min(nbytes, REPEATED_BYTES) // ITEM_BYTES[dtype]
    if path == NORMS:
        return Repeated(path, _stored(np.ones(items, np.float32), dtype))
    random = np.random.default_rng(seed)
    return Repeated(
        path, _stored(random.standard_normal(items, np.float32) * np.float32(STANDARD_DEVIATION), dtype)
    )


def _stored(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    return (values if dtype == "float32" else round_to_bfloat16(values)).view(np.uint8)


class Repeated:
    """An endless file that repeats the same bytes."""

    caching = "bypassed"

    def __init__(self, path: Path, pattern: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self._bytes = pattern

    def read(self, into: memoryview, offset: int, needed: int, *, cached: bool = False) -> int:
        """Fill `into` with the bytes at `offset`; returns its length."""
        target = np.frombuffer(into, dtype=np.uint8)
        done = 0
        while done < len(target):
            start = (offset + done) % len(self._bytes)
            piece = self._bytes[start : start + len(target) - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def require(self, offset: int, needed: int) -> None:
        """Do nothing: the file never ends early."""

    def close(self) -> None:
        """Do nothing: no file is open."""
