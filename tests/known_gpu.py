"""A machine with a GPU that is not there: its operations take the times that known rates give."""

from __future__ import annotations

from random import Random

import msgspec

from moesched.calibration.gpu_probe import GPU, HOST, Answer, Copy, Launches, Operation, Product, Stream
from moesched.models.config import ITEM_BYTES


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of a machine.

    Attributes:
        flops: of products of many rows, by processor and dtype.
        streams: bytes per second of a pass over a memory.
        reading: the share of it that a product of one row reads its weights with, by processor.
        links: bytes per second and latency of copies, by source and destination.
        launch: seconds from one kernel to the next.
        answer: seconds that the host waits for a result.
        beside: the speed of a copy beside another one.
        noise: how far a time may be off, as a share of it.
    """

    flops: dict[tuple[str, str], float]
    streams: dict[str, float]
    reading: dict[str, float]
    links: dict[tuple[str, str], tuple[float, float]]
    launch: float
    answer: float
    beside: float
    noise: float = 0.0


DESKTOP = Rates(
    flops={
        ("gpu", "bfloat16"): 50e12,
        ("gpu", "float32"): 20e12,
        ("cpu", "bfloat16"): 1.5e12,
        ("cpu", "float32"): 0.8e12,
    },
    streams={"gpu": 850e9, "host": 62e9},
    reading={"gpu": 0.8, "cpu": 0.7},
    links={
        ("pinned", "gpu"): (24e9, 9e-6),
        ("host", "gpu"): (11e9, 20e-6),
        ("gpu", "host"): (22e9, 8e-6),
        ("host", "pinned"): (14e9, 1e-6),
    },
    launch=4e-6,
    answer=15e-6,
    beside=0.75,
)
"""A desktop with a GPU of 24 GB."""


class KnownGpu:
    """A machine with these rates, as a calibration sees it."""

    gpu_name = "NVIDIA GeForce RTX 3090"
    gpu_bytes = 24 * 10**9
    host_bytes = 64 * 10**9
    half = "bfloat16"

    def __init__(self, rates: Rates = DESKTOP) -> None:
        self.closed = False
        self._rates = rates
        self._random = Random(7)

    def seconds(self, operation: Operation, *beside: Operation) -> float:
        alone = self._alone(operation) * (1 + self._rates.noise * self._random.uniform(-1, 1))
        return alone / self._rates.beside if beside else alone

    def close(self) -> None:
        self.closed = True

    def _alone(self, operation: Operation) -> float:
        rates = self._rates
        match operation:
            case Product():
                return self._product(operation)
            case Stream():
                return operation.nbytes / rates.streams[operation.memory]
            case Copy():
                bandwidth, latency = rates.links[operation.source, operation.destination]
                return latency + operation.nbytes / bandwidth
            case Launches():
                return operation.kernels * rates.launch
            case Answer():
                return rates.launch + rates.answer

    def _product(self, product: Product) -> float:
        """As long as computing or reading; the host launches the next kernel meanwhile."""
        rates, gpu = self._rates, product.processor == GPU
        weights = product.outputs * product.inputs
        bandwidth = rates.streams[GPU if gpu else HOST] * rates.reading[product.processor]
        computing = 2.0 * weights * product.rows / rates.flops[product.processor, product.dtype]
        reading = weights * ITEM_BYTES[product.dtype] / bandwidth
        return max(computing, reading, rates.launch if gpu else 0.0)
