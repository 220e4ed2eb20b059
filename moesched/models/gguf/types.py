"""Types of tensors in GGUF files; each type is a number that stands for a storage format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from moesched.models.stored_formats import PLAIN, STORED_FORMATS, StoredFormat


class TensorType(NamedTuple):
    """A type of tensors, as ggml defines it. Each row has a whole number of blocks.

    Attributes:
        block: number of weights of a block.
        block_bytes: number of bytes of a block.
    """

    name: str
    block: int
    block_bytes: int

    @property
    def stored(self) -> StoredFormat | None:
        """The storage format of this type; None if no kernel reads it."""
        return _STORED.get(self.name)


_STORED = {
    STORED_FORMATS[name].in_files if name in PLAIN else name.upper(): stored
    for name, stored in STORED_FORMATS.items()
}

TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        2: TensorType("Q4_0", 32, 18),
        3: TensorType("Q4_1", 32, 20),
        6: TensorType("Q5_0", 32, 22),
        7: TensorType("Q5_1", 32, 24),
        8: TensorType("Q8_0", 32, 34),
        9: TensorType("Q8_1", 32, 40),
        10: TensorType("Q2_K", 256, 84),
        11: TensorType("Q3_K", 256, 110),
        12: TensorType("Q4_K", 256, 144),
        13: TensorType("Q5_K", 256, 176),
        14: TensorType("Q6_K", 256, 210),
        15: TensorType("Q8_K", 256, 292),
        16: TensorType("IQ2_XXS", 256, 66),
        17: TensorType("IQ2_XS", 256, 74),
        18: TensorType("IQ3_XXS", 256, 98),
        19: TensorType("IQ1_S", 256, 50),
        20: TensorType("IQ4_NL", 32, 18),
        21: TensorType("IQ3_S", 256, 110),
        22: TensorType("IQ2_S", 256, 82),
        23: TensorType("IQ4_XS", 256, 136),
        24: TensorType("I8", 1, 1),
        25: TensorType("I16", 1, 2),
        26: TensorType("I32", 1, 4),
        27: TensorType("I64", 1, 8),
        28: TensorType("F64", 1, 8),
        29: TensorType("IQ1_M", 256, 56),
        30: TensorType("BF16", 1, 2),
        34: TensorType("TQ1_0", 256, 54),
        35: TensorType("TQ2_0", 256, 66),
        39: TensorType("MXFP4", 32, 17),
        40: TensorType("NVFP4", 64, 36),
        41: TensorType("Q1_0", 128, 18),
    }
)
"""All types, by number; `gguf.GGML_QUANT_SIZES` has the same sizes."""

BY_NAME: Mapping[str, TensorType] = MappingProxyType({each.name: each for each in TENSOR_TYPES.values()})
READABLE = tuple(each.name for each in TENSOR_TYPES.values() if each.stored is not None)
"""Names of the types that kernels read."""
