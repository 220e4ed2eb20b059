"""A model of random weights that are made in memory as they are read: no files, however large it is."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from moesched.models.checkpoint import Blocks, Checkpoint, StoredTensor
from moesched.models.config import ITEM_BYTES, ModelConfig
from moesched.models.tensors import tensor_shapes

from .page_reader import DTYPES

STANDARD_DEVIATION = 0.02
REPEATED_BYTES = (1 << 26) + (1 << 20)
"""How much is really random: it comes again and again, shifted against the pages, which are of other sizes."""

ALIGNMENT = 4096
NORMS, MATRICES = Path("norms made in memory"), Path("matrices made in memory")


def random_checkpoint(config: ModelConfig, seed: int = 0) -> Checkpoint:
    """A model with norms of 1 and matrices from a normal distribution, the same for the same seed."""
    ends = {NORMS: 0, MATRICES: 0}
    tensors: dict[str, StoredTensor] = {}
    for name, shape in tensor_shapes(config).items():
        file = NORMS if len(shape) == 1 else MATRICES
        nbytes = math.prod(shape) * ITEM_BYTES[config.dtype]
        tensors[name] = StoredTensor(file, ends[file], shape, config.dtype, nbytes)
        ends[file] += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Checkpoint(config, Path(), tensors, lambda path: _made(path, config.dtype, seed))


def _made(path: Path, dtype: str, seed: int) -> Blocks:
    items = REPEATED_BYTES // ITEM_BYTES[dtype]
    if path == NORMS:
        return Repeated(path, torch.ones(items, dtype=DTYPES[dtype]))
    chance = torch.Generator().manual_seed(seed)
    return Repeated(path, (torch.randn(items, generator=chance) * STANDARD_DEVIATION).to(DTYPES[dtype]))


class Repeated:
    """A file without end: the same items over and over."""

    caching = "bypassed"

    def __init__(self, path: Path, items: torch.Tensor) -> None:
        self.path = path
        self._bytes = items.view(torch.uint8).numpy()

    def read(self, into: memoryview, offset: int, needed: int) -> int:
        """Fill `into` with what lies at `offset`; returns its length."""
        target = np.frombuffer(into, dtype=np.uint8)
        done = 0
        while done < len(target):
            start = (offset + done) % len(self._bytes)
            piece = self._bytes[start : start + len(target) - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def require(self, offset: int, needed: int) -> None:
        """It holds as much as anybody needs."""

    def close(self) -> None:
        """There is nothing to let go of."""
