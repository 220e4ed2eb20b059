"""The class that describes a tensor to write to a file."""

from __future__ import annotations

import math
from typing import NamedTuple

from moesched.models.stored_formats import StoredFormat
from moesched.models.tensor_shapes import Shape


class WrittenTensor(NamedTuple):
    """A tensor's name in the file, its shape (counted in weights, not bytes), and the storage format of its rows."""

    name: str
    shape: Shape
    stored: StoredFormat

    @property
    def is_norm(self) -> bool:
        """True for a vector, which is taken for a norm: all of its values are written as 1."""
        return len(self.shape) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape[:-1]) * self.stored.row_bytes(self.shape[-1])
