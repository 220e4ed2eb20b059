"""Lists the operations that a calibration of a machine with a GPU times, and how often each is timed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec

from moesched.calibration.extent import CODED, small_model
from moesched.calibration.gpu_probe import (
    CPU,
    GPU,
    HOST,
    PINNED,
    Copy,
    Launches,
    Operation,
    Product,
    RoundTrip,
    Stream,
)
from moesched.models.config import ModelConfig

STAGING = (HOST, PINNED)
LINKS = ((HOST, GPU), (GPU, HOST), STAGING)
"""Pairs of memories between which copies are timed. Staging slots are for machines that can page-lock little memory."""

AT_ONCE = (((HOST, GPU), (GPU, HOST)), ((HOST, GPU), STAGING), ((GPU, HOST), STAGING))
"""Pairs of links whose copies are timed while both run."""


FULL = "float32"
"""The dtype whose products are measured for their FLOP/s only, not for the cost table."""

MODEL = small_model(
    "calibration-gpu", hidden=1024, intermediate=3584, heads=16, head_dim=128, vocabulary=8192
)
"""Model whose kernels are shorter than their dispatch; a fetch of its layer, 180 MB, outlasts attention on the host."""


class GpuExtent(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a calibration of a machine with a GPU measures.

    Attributes:
        rounds: number of times that each operation is measured; the reported spread is the range over these rounds.
        dtypes: dtypes of matrix products; a GPU without bfloat16 has float16 instead.
        matrices: (outputs, inputs) of products, from an expert of a small model to one of a large model.
        rows: numbers of rows of products on the GPU; in float32 only the fewest and the most.
        host_rows: numbers of rows of products on the CPU.
        coded_rows: numbers of rows of products with coded (quantised) matrices, on GPU and CPU.
        small, large: bytes of a small and a large copy, from which latency and bandwidth follow; `large` is about a
            page of weights.
        stream: bytes of a pass over memory.
        kernels: number of empty kernels launched in a row.
        model: the model whose tasks are timed.
        groups: prompt lengths of three micro-batches: a single sequence, many sequences, and many long sequences. Each
            micro-batch occurs twice in a run, with its KV cache on the GPU and on the host.
        steps: steps of each run of the model, prefill included.
        staging: bytes of page-locked memory in runs whose pages are staged. This memory also has room for the hidden
            states of a prefill, as input of experts on the host.
    """

    rounds: int = 5
    dtypes: tuple[str, ...] = ("bfloat16", FULL)
    matrices: tuple[tuple[int, int], ...] = ((1536, 2048), (2048, 4096), (4096, 4096), (14336, 4096))
    rows: tuple[int, ...] = (1, 8, 16, 64, 512, 4096)
    host_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 256)
    coded_rows: tuple[int, ...] = (1, 2, 4, 8, 64)
    small: int = 64 << 10
    large: int = 64 << 20
    stream: int = 512 << 20
    kernels: int = 200
    model: ModelConfig = MODEL
    groups: tuple[tuple[int, ...], ...] = ((16,), (16,) * 64, (512,) * 64)
    steps: int = 12
    staging: int = 1 << 30

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """Prompt lengths of each micro-batch of a run: `groups`, twice."""
        return self.groups * 2

    @property
    def on_host(self) -> range:
        """Indices of the micro-batches whose KV cache is on the host."""
        return range(len(self.groups), 2 * len(self.groups))

    @property
    def measurements(self) -> int:
        """Total number of measurements: operations and pairs in each round, and runs of the model."""
        each = len([*self.operations(), *self.pairs()])
        return self.rounds * (each + 3) + 1

    def operations(self) -> Iterator[Operation]:
        """Yield every operation that is timed alone; products with coded matrices only in the 16-bit dtype."""
        for dtype, (outputs, inputs) in product(self.dtypes, self.matrices):
            for processor, rows in ((GPU, self.rows), (CPU, self.host_rows)):
                for each in (rows[0], rows[-1]) if dtype == FULL else rows:
                    yield Product(processor, dtype, outputs, inputs, each)
        for stored, (outputs, inputs) in product(CODED, self.matrices):
            for processor, count in product((GPU, CPU), self.coded_rows):
                yield Product(processor, self.dtypes[0], outputs, inputs, count, stored)
        yield Stream(GPU, self.stream)
        yield Stream(HOST, self.stream)
        for source, destination in LINKS:
            yield Copy(source, destination, self.small)
            yield Copy(source, destination, self.large)
        yield Launches(self.kernels)
        yield RoundTrip(8)

    def pairs(self) -> Iterator[tuple[Copy, Copy]]:
        """Yield pairs of copies that run at once; only the first copy of each pair is timed."""
        for first, second in AT_ONCE:
            yield Copy(*first, self.large), Copy(*second, self.large)
            yield Copy(*second, self.large), Copy(*first, self.large)


THOROUGH_GPU = GpuExtent()
QUICK_GPU = GpuExtent(rounds=3, matrices=((2048, 4096), (14336, 4096)))
