"""The operations that `moesched calibrate --device cuda` times, on the first CUDA device and on its host."""

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
    Answer,
    Copy,
    Launches,
    Operation,
    Product,
    Stream,
)
from moesched.system.memory import available_memory

from ..shared.page_reader import DTYPES
from .cuda_device import dtype_on, require_cuda
from .probe import TorchProbe

Call = Callable[[], object]

SECONDS = 0.02
"""Time that an operation is repeated for."""
LEAST, MOST = 3, 200
"""Fewest and most repetitions."""
LONGER = 3
"""How much longer operations beside it are repeated."""
COLD_BYTES = 256 << 20
"""Bytes of matrices that take turns, so that no cache of the GPU holds them; its largest has less."""

_UNTYPED: Any = torch.cuda
"""torch gives the constructors of streams and events no types."""


class CudaProbe:
    """Operations on the first CUDA device, on streams of their own, and on the CPU.

    Kernels and page-locked copies are timed by events on their stream, all else by the host's clock.

    Attributes:
        gpu_name: as torch says it.
        gpu_bytes: size of the GPU's memory.
        host_bytes: size of the host's memory.
        half: the number format of 16 bits that the GPU has.
    """

    def __init__(self, threads: int) -> None:
        require_cuda()
        gpu = torch.cuda.get_device_properties(0)
        self.gpu_name: str = gpu.name
        self.gpu_bytes: int = gpu.total_memory
        self.host_bytes = available_memory()
        self.half = dtype_on((gpu.major, gpu.minor), "bfloat16")
        self._device = torch.device("cuda:0")
        self._host = TorchProbe(threads)

    def close(self) -> None:
        """Free the GPU's memory, and end the host's threads."""
        self._host.close()
        torch.cuda.empty_cache()

    def seconds(self, operation: Operation, *beside: Operation) -> float:
        """The time of an operation among repetitions of it, while others are repeated beside it."""
        with torch.inference_mode(), torch.cuda.device(self._device), ExitStack() as running:
            call, others = self._call(operation), [(other, self._call(other)) for other in beside]
            running.callback(torch.cuda.synchronize)
            times = _repetitions(call, SECONDS)
            longer = [_repetitions(other, LONGER * SECONDS) for _, other in others]
            for (kind, other), count in zip(others, longer, strict=True):
                if is_enqueued(kind):
                    self._enqueue(other, count)
                else:
                    running.enter_context(_in_a_thread(other))
            if is_enqueued(operation):
                return self._enqueued(call, times)
            return _timed(call, times, alone=not beside)

    def _enqueue(self, call: Call, times: int) -> None:
        """Begin a call again and again on a stream of its own."""
        with torch.cuda.stream(_UNTYPED.Stream(self._device)):
            for _ in range(times):
                call()

    def _enqueued(self, call: Call, times: int) -> float:
        """The time of an enqueued call among others on one stream, by events around them."""
        start, end = _UNTYPED.Event(enable_timing=True), _UNTYPED.Event(enable_timing=True)
        with torch.cuda.stream(_UNTYPED.Stream(self._device)):
            start.record()
            for _ in range(times):
                call()
            end.record()
            end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3 / times

    def _call(self, operation: Operation) -> Call:
        """Make data for an operation, and return what begins it on the current stream."""
        match operation:
            case Product():
                return (
                    self._product(operation) if operation.processor == GPU else self._host_product(operation)
                )
            case Stream():
                return self._stream(operation)
            case Copy():
                source = self._room(operation.source, operation)
                target = self._room(operation.destination, operation)
                return lambda: target.copy_(source, non_blocking=True)
            case Launches():
                one = torch.ones(1, device=self._device)
                return lambda: [one.add_(1.0) for _ in range(operation.kernels)]
            case Answer():
                some = torch.ones(operation.nbytes // 4, device=self._device)
                return lambda: some.add_(1.0).tolist()

    def _host_product(self, product: Product) -> Call:
        of_rows = self._host.product(product.dtype, product.outputs, product.inputs, packed=False)
        return of_rows(product.rows)

    def _stream(self, stream: Stream) -> Call:
        if stream.memory == HOST:
            return self._host.stream(stream.nbytes)
        numbers = torch.ones(stream.nbytes // 4, device=self._device)
        return lambda: numbers.sum()

    def _product(self, product: Product) -> Call:
        dtype = DTYPES[product.dtype]
        nbytes = product.outputs * product.inputs * dtype.itemsize
        matrices = cycle(
            [
                torch.full((product.outputs, product.inputs), 0.01, dtype=dtype, device=self._device)
                for _ in range(max(1, COLD_BYTES // nbytes))
            ]
        )
        x_TD = torch.full((product.rows, product.inputs), 0.01, dtype=dtype, device=self._device)
        return lambda: torch.nn.functional.linear(x_TD, next(matrices))

    def _room(self, memory: str, copy: Copy) -> torch.Tensor:
        """Bytes in a memory. Copies from the GPU end in page-locked memory, as those of the device do."""
        if memory == GPU:
            return torch.ones(copy.nbytes, dtype=torch.uint8, device=self._device)
        locked = memory == PINNED or copy.source == GPU
        room = torch.ones(copy.nbytes, dtype=torch.uint8)
        return room.pin_memory() if locked else room


def is_enqueued(operation: Operation) -> bool:
    """Whether the host only begins an operation, which then runs on a stream."""
    match operation:
        case Product():
            return operation.processor == GPU
        case Stream():
            return operation.memory == GPU
        case Copy():
            return (operation.source, operation.destination) in ((PINNED, GPU), (GPU, HOST))
    return False


def _repetitions(call: Call, seconds: float) -> int:
    """The number of calls that take about that long, within limits."""
    _timed(call, 1)  # may prepare its kernel
    return min(MOST, max(LEAST, round(seconds / max(_timed(call, 1), 1e-9))))


@contextmanager
def _in_a_thread(call: Call) -> Iterator[None]:
    """Repeat a call of the host in a thread of its own."""
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


def _timed(call: Call, times: int, *, alone: bool = True) -> float:
    """The time of a call by the host's clock.

    alone: whether to wait until the GPU is idle, before and after; otherwise it goes on with what runs beside.
    """
    if alone:
        torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(times):
        call()
    if alone:
        torch.cuda.synchronize()
    return (perf_counter() - start) / times
