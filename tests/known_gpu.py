"""A machine with a GPU that is not there: its operations take the times that known rates give."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
from msgspec.structs import replace

from moesched.calibration.exercise import FinishedTasks
from moesched.calibration.gpu_probe import GPU, HOST, Copy, Launches, Operation, Product, RoundTrip, Stream
from moesched.machines import Contention, CostPoint, Machine
from moesched.machines.estimates import Estimate
from moesched.models.config import ITEM_BYTES, DType, ModelConfig
from moesched.models.layout import weight_layout
from moesched.requests.batch import Batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.tasks import Task


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
        dispatch: seconds that a task of a kind takes to start, and seconds more for each call, by resource and kind.
        attention: the share of its memory's bandwidth that attention on the host reads with.
        attention_beside: its speed beside copies to the GPU, and beside copies into staging slots.
        writes_beside: the same of cache writes.
        pages_beside: speeds of copies to the GPU beside attention on the host, and beside cache writes.
        noise: how far a time may be off, as a share of it.
    """

    flops: dict[tuple[str, str], float]
    streams: dict[str, float]
    reading: dict[str, float]
    links: dict[tuple[str, str], tuple[float, float]]
    launch: float
    answer: float
    beside: float
    dispatch: dict[tuple[str, str], tuple[float, float]] = {}
    attention: float = 0.5
    attention_beside: tuple[float, float] = (1.0, 1.0)
    writes_beside: tuple[float, float] = (1.0, 1.0)
    pages_beside: tuple[float, float] = (1.0, 1.0)
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
    links={("host", "gpu"): (24e9, 9e-6), ("gpu", "host"): (22e9, 8e-6), ("host", "pinned"): (14e9, 1e-6)},
    launch=4e-6,
    answer=15e-6,
    beside=0.75,
    dispatch={
        ("gpu", "embed"): (60e-6, 0.0),
        ("gpu", "pre_attention"): (250e-6, 0.0),
        ("gpu", "attention"): (150e-6, 30e-6),
        ("gpu", "post_attention"): (400e-6, 220e-6),
        ("gpu", "sample"): (300e-6, 0.0),
        ("cpu", "cpu_attention"): (200e-6, 0.0),
        ("gpu->host", "offload_qkv"): (70e-6, 0.0),
        ("gpu->host", "offload_kv"): (900e-6, 0.0),
        ("host->gpu", "load_hidden"): (50e-6, 0.0),
    },
    attention=0.6,
    attention_beside=(0.8, 0.5),
    writes_beside=(0.7, 0.6),
    pages_beside=(0.95, 0.85),
)
"""A desktop with a GPU of 24 GB."""


class KnownGpu:
    """A machine with these rates, as a calibration sees it."""

    gpu_name = "NVIDIA GeForce RTX 3090"
    gpu_bytes = 24 * 10**9
    host_bytes = 64 * 10**9
    half: DType = "bfloat16"

    def __init__(self, rates: Rates = DESKTOP) -> None:
        self.closed = False
        self._rates = rates
        self._random = Random(7)

    def seconds(self, operation: Operation, *beside: Operation) -> float:
        alone = self._alone(operation) * self._noise()
        return alone / self._rates.beside if beside else alone

    def tasks(
        self,
        model: ModelConfig,
        policy: Policy,
        groups: Sequence[Sequence[int]],
        steps: int,
        machine: Machine,
    ) -> list[Task]:
        lengths = tuple(length for group in groups for length in group)
        numbers = iter(range(len(lengths)))
        batch = Batch(lengths, steps, tuple(tuple(next(numbers) for _ in group) for group in groups))
        finished = FinishedTasks()
        plan = plan_run(self.truth(machine, self._noise()), weight_layout(model, self.half), batch, policy)
        simulate(plan, policy, observers=[finished])
        return finished.tasks

    def truth(self, measured: Machine, slower: float = 1.0) -> Machine:
        """A machine with measured products and copies, as its tasks are known to be, or slower by a factor."""
        rates = self._rates
        starts = [
            CostPoint(operation=f"dispatch {kind}", resource=resource, size=0, rows=calls, seconds=seconds)
            for (resource, kind), (first, each) in rates.dispatch.items()
            for calls, seconds in ((0, slower * first), (1000, slower * (first + 1000 * each)))
        ]
        reading = rates.attention / slower
        share = Estimate(low=reading, expected=reading, high=reading)
        cpu = replace(measured.host, rates=measured.host.rates | {"attention": share})
        link = f"{measured.roles.pinned or HOST}->{GPU}"
        copies, on_host = (link, "host->pinned"), ("attention", "cache write")
        slowed = (rates.attention_beside, rates.writes_beside)
        beside = [
            Contention(work=work, beside=each, rate=rate)
            for work, speeds in zip(on_host, slowed, strict=True)
            for each, rate in zip(copies, speeds, strict=True)
        ]
        beside += [
            Contention(work=link, beside=each, rate=rate)
            for each, rate in zip(on_host, rates.pages_beside, strict=True)
        ]
        return replace(
            measured,
            processors=measured.processors | {"cpu": cpu},
            cost_table=[*measured.cost_table, *starts],
            contention=[*measured.contention, *beside],
        )

    def close(self) -> None:
        self.closed = True

    def _noise(self) -> float:
        return 1 + self._rates.noise * self._random.uniform(-1, 1)

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
            case RoundTrip():
                return rates.launch + rates.answer

    def _product(self, product: Product) -> float:
        """As long as computing or reading; the host launches the next kernel meanwhile."""
        rates, gpu = self._rates, product.processor == GPU
        weights = product.outputs * product.inputs
        bandwidth = rates.streams[GPU if gpu else HOST] * rates.reading[product.processor]
        computing = 2.0 * weights * product.rows / rates.flops[product.processor, product.dtype]
        reading = weights * ITEM_BYTES[product.dtype] / bandwidth
        return max(computing, reading, rates.launch if gpu else 0.0)
