"""Checkpoints with a number that is wrong."""

from __future__ import annotations

import struct
from pathlib import Path

from moesched.models.checkpoint import open_checkpoint


def damage(directory: Path, name: str, *, row: int = 0, number: float = float("nan")) -> None:
    """Put a number into a tensor, first in a row."""
    stored = open_checkpoint(directory).tensors[name]
    assert stored.format.name == "float32"
    width = 1 if len(stored.shape) == 1 else stored.shape[1]
    with stored.file.open("r+b") as file:
        file.seek(stored.offset + 4 * width * row)
        file.write(struct.pack("<f", number))


def damage_scale(model: Path, name: str, scale: bytes) -> None:
    """Write the scale with which the first block of a tensor begins."""
    stored = open_checkpoint(model).tensors[name]
    with stored.file.open("r+b") as file:
        file.seek(stored.offset)
        file.write(scale)
