"""The operations that a calibration of a machine with a GPU times, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec

from moesched.calibration.gpu_probe import (
    CPU,
    GPU,
    HOST,
    PINNED,
    Answer,
    Copy,
    Launches,
    Operation,
    Product,
    Stream,
)

LINKS = ((PINNED, GPU), (HOST, GPU), (GPU, HOST), (HOST, PINNED))
"""Copies that policies make: to and from the GPU, and into pinned memory. A copy to the host is page-locked."""

AT_ONCE = (((PINNED, GPU), (GPU, HOST)), ((PINNED, GPU), (HOST, PINNED)), ((GPU, HOST), (HOST, PINNED)))
"""Pairs of links whose copies run at once."""


class GpuExtent(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a calibration of a machine with a GPU measures.

    Attributes:
        rounds: how often each operation is measured; the spread is that of the rounds.
        dtypes: of products; on a GPU without bfloat16, float16 instead.
        matrices: (outputs, inputs) of products, from an expert of a small model to one of a large model.
        rows: of products that are bound by compute; those of one row are bound by reading.
        host_rows: the same on the CPU.
        small, large: bytes of copies, whose times give latency and bandwidth.
        stream: bytes of a pass over memory.
        kernels: launches in a row.
    """

    rounds: int = 5
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    matrices: tuple[tuple[int, int], ...] = ((1536, 2048), (2048, 4096), (4096, 4096), (14336, 4096))
    rows: tuple[int, ...] = (512, 2048)
    host_rows: tuple[int, ...] = (256,)
    small: int = 64 << 10
    large: int = 64 << 20
    stream: int = 512 << 20
    kernels: int = 200

    def operations(self) -> Iterator[Operation]:
        """Every operation, alone."""
        for dtype, (outputs, inputs) in product(self.dtypes, self.matrices):
            for processor, rows in ((GPU, self.rows), (CPU, self.host_rows)):
                for each in (1, *rows):
                    yield Product(processor, dtype, outputs, inputs, each)
        yield Stream(GPU, self.stream)
        yield Stream(HOST, self.stream)
        for source, destination in LINKS:
            yield Copy(source, destination, self.small)
            yield Copy(source, destination, self.large)
        yield Launches(self.kernels)
        yield Answer(8)

    def pairs(self) -> Iterator[tuple[Copy, Copy]]:
        """Copies that run at once; the first of each pair is timed."""
        for first, second in AT_ONCE:
            yield Copy(*first, self.large), Copy(*second, self.large)
            yield Copy(*second, self.large), Copy(*first, self.large)


THOROUGH_GPU = GpuExtent()
QUICK_GPU = GpuExtent(rounds=3, matrices=((2048, 4096), (14336, 4096)), rows=(2048,))
