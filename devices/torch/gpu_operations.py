"""The operations of an accelerator and its host that calibration times: each operation alone, and beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from threading import Event, Thread
from time import perf_counter
from typing import Any

import torch

from moesched.calibration.gpu_probe import (
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
from moesched.models.stored_formats import STORED_FORMATS
from moesched.system.cores import CorePlan

from ..kernels.samples import coded_block
from ..native.copy_team import CopyTeam
from ..products.coded_linear import unpacked_linear
from ..products.linear import linear
from ..shared.coded import CodedRows
from ..shared.page_reader import DTYPES
from .locked_memory import locked_bytes
from .probe import TorchProbe

Call = Callable[[], object]

SECONDS = 0.02
"""Seconds for which an operation is repeated."""
LEAST, MOST = 3, 200
"""Fewest and most repetitions of an operation."""
LONGER = 3
"""Operations beside a timed one are repeated for this many times as long as the timed one."""
COLD_BYTES = 512 << 20
"""Total bytes of the matrices or buffers that an operation uses in turn: more than any cache holds."""


class GpuOperations:
    """Times operations of an accelerator and of the host's CPU.

    GPU kernels and copies of page-locked memory are timed by events on a stream, all else by the host's clock.

    Args:
        device: the accelerator's torch device.
        cores: the division of the host's cores.
        seconds: seconds for which an operation is repeated.
        cold: total bytes of the matrices or buffers that an operation uses in turn, so that none is in a cache.
    """

    def __init__(
        self, device: torch.device, cores: CorePlan, *, seconds: float = SECONDS, cold: int = COLD_BYTES
    ) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._host = TorchProbe(cores.kernels)
        self._copies = CopyTeam(cores.copies)
        self._seconds = seconds
        self._cold = cold

    def close(self) -> None:
        """Free the accelerator's memory, and end the threads on the host."""
        self._host.close()
        self._copies.close()
        self._module.empty_cache()

    def seconds(self, operation: Operation, *beside: Operation) -> float:
        """Return the mean seconds of a repeated operation; the operations `beside` are repeated at the same time."""
        with torch.inference_mode(), ExitStack() as running:
            call, others = self._call(operation), [(other, self._call(other)) for other in beside]
            running.callback(self._module.synchronize)
            times = self._repetitions(call, self._seconds)
            longer = [self._repetitions(other, LONGER * self._seconds) for _, other in others]
            for (kind, other), count in zip(others, longer, strict=True):
                if is_enqueued(kind):
                    self._enqueue(other, count)
                else:
                    running.enter_context(_in_a_thread(other))
            if is_enqueued(operation):
                return self._enqueued(call, times)
            return self._timed(call, times, alone=not beside)

    def _enqueue(self, call: Call, times: int) -> None:
        """Enqueue a call `times` times on a new stream, without waiting."""
        with self._module.stream(self._module.Stream(self._device)):
            for _ in range(times):
                call()

    def _enqueued(self, call: Call, times: int) -> float:
        """Enqueue a call `times` times on a new stream; returns the mean seconds of a call, measured by events."""
        start, end = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
        with self._module.stream(self._module.Stream(self._device)):
            start.record()
            for _ in range(times):
                call()
            end.record()
            end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3 / times

    def _timed(self, call: Call, times: int, *, alone: bool = True) -> float:
        """Make a call `times` times; returns the mean seconds of a call, measured by the host's clock.

        alone: whether to wait until the accelerator is idle, before and after; False while other operations run there.
        """
        if alone:
            self._module.synchronize()
        start = perf_counter()
        for _ in range(times):
            call()
        if alone:
            self._module.synchronize()
        return (perf_counter() - start) / times

    def _repetitions(self, call: Call, seconds: float) -> int:
        """Return the number of times that a call runs in about `seconds` seconds; at least 3 and at most 200."""
        self._timed(call, 1)  # may prepare its kernel
        return min(MOST, max(LEAST, round(seconds / max(self._timed(call, 1), 1e-9))))

    def _call(self, operation: Operation) -> Call:
        """Make data for an operation; returns a function that runs it on the CPU, or enqueues it on a CUDA stream."""
        match operation:
            case Product():
                return self._product(operation)
            case Stream():
                return self._stream(operation)
            case Copy():
                return self._copy(operation)
            case Launches():
                one = torch.ones(1, device=self._device)
                return lambda: [one.add_(1.0) for _ in range(operation.kernels)]
            case RoundTrip():
                some = torch.ones(operation.nbytes // 4, device=self._device)
                return lambda: some.add_(1.0).tolist()

    def _product(self, product: Product) -> Call:
        if product.processor != GPU:
            of_rows = self._host.product(
                product.dtype, product.outputs, product.inputs, stored=product.format
            )
            return of_rows(product.rows)
        dtype = DTYPES[product.dtype]
        x_TD = torch.full((product.rows, product.inputs), 0.01, dtype=dtype, device=self._device)
        row_1D = torch.full((1, product.inputs), 0.01, dtype=dtype)
        if not product.format:
            plain = self._copies_of(row_1D, product.outputs)
            return lambda: linear(x_TD, [next(plain)])
        row = coded_block(row_1D, STORED_FORMATS[product.format])
        coded = self._copies_of(row.raw_NB, product.outputs)
        return lambda: unpacked_linear(x_TD, CodedRows(next(coded), row.format))

    def _copies_of(self, row_1D: torch.Tensor, outputs: int) -> Iterator[torch.Tensor]:
        """Return an endless iterator over equal matrices on the accelerator, if possible of `cold` bytes together.

        Args:
            row_1D: the row that all rows of the matrices are copies of.
            outputs: number of rows of each matrix, which are the outputs of a product.
        """
        count = self._buffers(outputs * row_1D.nbytes)
        row_1D = row_1D.to(self._device)
        return cycle([row_1D.repeat(outputs, 1) for _ in range(count)])

    def _stream(self, stream: Stream) -> Call:
        if stream.memory == HOST:
            return self._host.stream(stream.nbytes)
        numbers = torch.ones(stream.nbytes // 4, device=self._device)
        return lambda: numbers.sum()

    def _copy(self, copy: Copy) -> Call:
        sources, targets = (cycle(self._rooms(memory, copy)) for memory in (copy.source, copy.destination))
        if is_enqueued(copy):
            return lambda: next(targets).copy_(next(sources), non_blocking=True)
        return lambda: self._copy_within_host(next(targets), next(sources))

    def _copy_within_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a page of weights from ordinary memory (`source`) to page-locked memory (`target`), by threads."""
        self._copies.copy([(target, source)])

    def _rooms(self, memory: str, copy: Copy) -> list[torch.Tensor]:
        """Make the buffers for the source or the target of a timed copy; repetitions of the copy use them in turn.

        Buffers of the host are page-locked if `memory` is PINNED, or if the GPU copies from or to them.

        Args:
            memory: memory of the source or the target: GPU, HOST or PINNED.
            copy: the copy; each buffer has `copy.nbytes` bytes.
        """
        count, ends = self._buffers(copy.nbytes), (copy.source, copy.destination)
        if memory == GPU:
            return [torch.ones(copy.nbytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        if memory == PINNED or GPU in ends:
            return list(locked_bytes(count * copy.nbytes, self._device).split(copy.nbytes))
        return [torch.ones(copy.nbytes, dtype=torch.uint8) for _ in range(count)]

    def _buffers(self, nbytes: int) -> int:
        """Return the number of buffers of `nbytes` bytes to use in turn: about `cold` bytes, but 2 to MOST buffers."""
        return max(2, min(MOST, self._cold // nbytes))


def is_enqueued(operation: Operation) -> bool:
    """Test whether an operation runs on a stream of the GPU, so that the host only enqueues it."""
    match operation:
        case Product():
            return operation.processor == GPU
        case Stream():
            return operation.memory == GPU
        case Copy():
            return GPU in (operation.source, operation.destination)
    return False


@contextmanager
def _in_a_thread(call: Call) -> Iterator[None]:
    """Repeat a call on another thread until the context ends."""
    ended = Event()

    def repeat() -> None:
        with torch.inference_mode():
            while not ended.is_set():
                call()

    thread = Thread(target=repeat, name="beside")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
