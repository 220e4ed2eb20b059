"""Computes the rates of a machine with a GPU from the times of its operations in several rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from moesched.calibration.gpu_probe import Copy, Launches, Operation, Product, RoundTrip, Stream
from moesched.calibration.task_times import LEAST_SECONDS, point, rounded
from moesched.errors import BadInput
from moesched.machines import CostPoint
from moesched.machines.estimates import Estimate
from moesched.machines.product_times import PRODUCT
from moesched.models.config import ITEM_BYTES
from moesched.models.stored_formats import STORED_FORMATS

MEASURED = "measured by `moesched calibrate`"
LAUNCHES_OF_A_KERNEL = 1.5
"""Kernels shorter than this many launches may have waited for their launch, and tell nothing about memory."""

Times = Mapping[Operation, Sequence[float]]


class MeasuredRate(NamedTuple):
    """The best of several measured rates; `sustained` has their median, lowest and highest as shares of the best."""

    best: float
    sustained: Estimate


class LinkRate(NamedTuple):
    """A link's measured bandwidth in bytes per second, and its latency: the seconds of a transfer of no bytes."""

    bandwidth: MeasuredRate
    latency: float


def products(times: Times, processor: str, dtype: str) -> MeasuredRate:
    """Return the FLOP/s of products on a processor, with the largest measured number of rows.

    Raises:
        BadInput: no product in this dtype was measured.
    """
    found = list(_products(times, processor, dtype))
    most = max((each.rows for each, _ in found), default=0)
    rates = [
        2.0 * each.outputs * each.inputs * each.rows / seconds for each, seconds in found if each.rows == most
    ]
    return measured_rate(rates, f"products in {dtype} on the {processor}")


def weights(times: Times, processor: str, launch: float, bandwidth: float) -> Estimate:
    """Return the share of memory bandwidth that a processor reaches in products of one row, which are bound by reads.

    Args:
        launch: seconds of a kernel's launch; kernels that are hardly longer do not count.
        bandwidth: bytes per second of the memory.

    Raises:
        BadInput: all kernels were too short.
    """
    dtypes = {each.dtype for each in times if isinstance(each, Product) and each.processor == processor}
    rates = [
        each.outputs * each.inputs * ITEM_BYTES[each.dtype] / seconds
        for dtype in sorted(dtypes)
        for each, seconds in _products(times, processor, dtype)
        if each.rows == 1 and seconds > LAUNCHES_OF_A_KERNEL * launch
    ]
    if not rates:
        raise BadInput(
            f"every product of one row on the {processor} was shorter than a launch: close other programs"
        )
    return estimate([rate / bandwidth for rate in rates])


def stream(times: Times, memory: str) -> float:
    """Return the bytes per second of the fastest measured pass over a memory."""
    return rounded(
        max(
            each.nbytes / min(seconds)
            for each, seconds in times.items()
            if isinstance(each, Stream) and each.memory == memory
        )
    )


def launch_seconds(times: Times) -> Estimate:
    """Return the measured seconds from the start of one empty kernel to the next."""
    return estimate(
        [
            seconds / each.kernels
            for each, rounds in times.items()
            if isinstance(each, Launches)
            for seconds in rounds
        ]
    )


def host_seconds(times: Times, launch: float) -> Estimate:
    """Return the measured seconds that the host waits for a kernel's result, less `launch` seconds for its launch."""
    waits = [seconds for each, rounds in times.items() if isinstance(each, RoundTrip) for seconds in rounds]
    return estimate([max(LEAST_SECONDS, seconds - launch) for seconds in waits])


def link(times: Times, source: str, destination: str) -> LinkRate:
    """Return bandwidth and latency of the link from `source` to `destination`, from its smallest and largest copies."""
    of_link = sorted(
        (each.nbytes, rounds)
        for each, rounds in times.items()
        if isinstance(each, Copy) and (each.source, each.destination) == (source, destination)
    )
    (small, short), (large, long) = of_link[0], of_link[-1]
    rates = [
        (large - small) / max(LEAST_SECONDS, after - before)
        for before, after in zip(short, long, strict=True)
    ]
    bandwidth = measured_rate(rates, f"copies from {source} to {destination}")
    latency = max(0.0, median(short) - small / median(rates))
    return LinkRate(bandwidth, rounded(latency))


def require_cold(copies: MeasuredRate, memory: float) -> None:
    """Refuse measured copies within a memory that were faster than the memory can read and write.

    Args:
        memory: the memory's bytes per second.

    Raises:
        BadInput: the copies were too fast; caches held the bytes.
    """
    if copies.best > memory / 2:
        raise BadInput(
            f"copies within the host's memory came to {copies.best / 1e9:.3g} GB/s, more than half of its "
            f"{memory / 1e9:.3g} GB/s, though a copy reads and writes: caches held the bytes: "
            "end other programs and calibrate again"
        )


def table(times: Times, dtype: str) -> list[CostPoint]:
    """Return points of a cost table: the median seconds over rounds of each measured product in a dtype."""
    return [
        replace(
            point(
                PRODUCT,
                dtype,
                each.rows,
                each.outputs * STORED_FORMATS[each.format or each.dtype].row_bytes(each.inputs),
                median(rounds),
            ),
            resource=each.processor,
            format=each.format,
        )
        for each, rounds in times.items()
        if isinstance(each, Product) and each.dtype == dtype
    ]


def product_speeds(times: Times, dtype: str) -> list[float]:
    """Return the speed of each round: the median over all products in a dtype.

    A product's speed in a round is relative to its median speed over all rounds.
    """
    products = [rounds for each, rounds in times.items() if isinstance(each, Product) and each.dtype == dtype]
    return [median(median(rounds) / rounds[turn] for rounds in products) for turn in range(len(products[0]))]


def speed_beside(alone: Sequence[float], together: Sequence[float]) -> float:
    """Return a copy's speed beside another copy, relative to running alone; at most 1.

    Args:
        alone, together: seconds of the copy in each round, alone and beside the other copy.
    """
    return rounded(min(1.0, median(before / after for before, after in zip(alone, together, strict=True))))


def measured_rate(rates: Sequence[float], what: str) -> MeasuredRate:
    """Return the best of several rates, and the median, lowest and highest rate relative to the best.

    Args:
        what: name of what was measured, for the error message.

    Raises:
        BadInput: there are no rates.
    """
    if not rates:
        raise BadInput(f"no {what} were measured")
    best = rounded(max(rates))
    return MeasuredRate(best, estimate([rate / best for rate in rates]))


def estimate(figures: Sequence[float]) -> Estimate:
    """Return the median of measured figures, with the lowest and the highest as bounds."""
    return Estimate(
        low=rounded(min(figures)),
        expected=rounded(median(figures)),
        high=rounded(max(figures)),
        source=MEASURED,
    )


def _products(times: Times, processor: str, dtype: str) -> Iterator[tuple[Product, float]]:
    """Yield a processor's products with plain matrices in a dtype, each with its seconds, once for each round."""
    for each, rounds in times.items():
        if isinstance(each, Product) and (each.processor, each.dtype, each.format) == (processor, dtype, ""):
            for seconds in rounds:
                yield each, seconds
