"""Imitated streams: enqueued work runs late, and in any order that CUDA's streams and events allow."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch

from ..products.team import use_cores
from .captures import Capture

EAGERNESS = (0.0, 0.0, 0.1, 1.0)
"""Probabilities that a stream runs its ready work when work is enqueued on any stream; each stream gets one of them."""

DRIFT = 50e-6
"""Share by which a GPU's clock is faster or slower than the host's."""


class DeviceLost(RuntimeError):
    """An asynchronous error of a GPU: raised by every call after the failure, not by the call that queued the work."""


class Item(NamedTuple):
    """An item of a stream's queue: a piece of work, the recording of an event, or a wait for an event.

    Attributes:
        work: the work as a function; None for an event.
        event: the event; None for work.
        version: number, counted from 1, of the event's recording that this item makes or waits for. It is 0 for work,
            and for a wait for an event without a recording.
        waits: whether the item waits for the event instead of recording it.
    """

    work: Callable[[], object] | None = None
    event: LaggingEvent | None = None
    version: int = 0
    waits: bool = False


class LaggingStream:
    """A queue of work that runs in order, at random times.

    Attributes:
        queue: the work that has not run yet.
        number: number of the stream's GPU.
        eagerness: probability that the stream runs its ready work whenever something is enqueued on any stream.
        capture: the capture that records the stream's work; None while the stream does not capture.
    """

    def __init__(self, gpu: Gpu, number: int) -> None:
        self.queue: deque[Item] = deque()
        self.number = number
        self.eagerness = gpu.random.choice(EAGERNESS)
        self.capture: Capture | None = None
        self._gpu = gpu

    def enqueue(self, work: Callable[[], object]) -> None:
        """Append a piece of work to the queue, or to the capture while the stream captures."""
        if self.capture is not None:
            self.capture.works.append(work)
        else:
            self._put(Item(work=work))

    def record(self, event: LaggingEvent) -> None:
        """Append the recording of an event to the queue; the event happens when all earlier items have run."""
        event.capture = self.capture
        if self.capture is None:
            self._put(Item(event=event, version=event.recorded))

    def wait_event(self, event: LaggingEvent) -> None:
        """Make all later work of this stream wait until the last recording of an event has happened.

        Raises:
            RuntimeError: this stream captures, and the event was not recorded in the same capture; or this stream does
                not capture, and the event was recorded in a capture.
        """
        broken = event.capture or self.capture
        if broken is not None and event.capture is not self.capture:
            raise broken.refused(": an edge to a stream that does not capture")
        if self.capture is None:
            self._put(Item(event=event, version=event.recorded, waits=True))

    def synchronize(self) -> None:
        """Wait until all work in the queue has run."""
        if self.capture is not None:
            raise self.capture.refused()
        self._gpu.drained[threading.current_thread().name] += 1
        self._gpu.run_until(lambda: not self.queue)

    def is_ready(self) -> bool:
        """Test whether the first item of the queue may run: it waits for no event, or its event has happened."""
        if not self.queue:
            return False
        head = self.queue[0]
        return not head.waits or head.event is None or head.event.happened >= head.version

    def run_head(self) -> None:
        """Run the first item of the queue; `is_ready` must be true."""
        head = self.queue.popleft()
        if head.work is not None:
            self._gpu.run(head.work)
        elif head.event is not None and not head.waits:
            head.event.happen(head.version, self._gpu.nanoseconds(self.number))

    def _put(self, item: Item) -> None:
        with self._gpu.lock:
            self._gpu.raise_error()
            self.queue.append(item)
            self._gpu.lag()


class LaggingEvent:
    """An event, which may be recorded on a stream several times.

    Attributes:
        recorded: number of the last recording that was enqueued.
        happened: number of the last recording that has happened.
        blocking: whether a thread that waits for the event leaves its core to other threads.
        capture: the capture that the event was last recorded in; None if that recording was outside of captures.
    """

    def __init__(self, gpu: Gpu, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.recorded = self.happened = 0
        self.blocking = blocking
        self.capture: Capture | None = None
        self._timed = enable_timing
        self._nanoseconds = 0
        self._number: int | None = None
        self._gpu = gpu
        gpu.events.add(self)
        gpu.events_made += 1

    def record(self, stream: LaggingStream | None = None) -> None:
        """Record the event on a stream; None takes the current stream.

        Raises:
            RuntimeError: the event was recorded on another GPU before.
        """
        with self._gpu.lock:
            stream = stream or self._gpu.current
            if self._number not in (None, stream.number):
                raise RuntimeError(f"event of GPU {self._number} recorded on GPU {stream.number}")
            self._number = stream.number
            self.recorded += 1
            stream.record(self)

    def synchronize(self) -> None:
        """Wait until the event's last recording has happened."""
        if self.capture is not None:
            raise self.capture.refused()
        version = self.recorded
        self._gpu.run_until(lambda: self.happened >= version)

    def query(self) -> bool:
        """Test whether the event's last recording has happened."""
        with self._gpu.lock:
            self._gpu.refuse_unsafe()
            self._gpu.raise_error()
            return self.happened >= self.recorded

    def happen(self, version: int, nanoseconds: int) -> None:
        """Note that recording number `version` of the event happened, at a time in nanoseconds."""
        self.happened, self._nanoseconds = version, nanoseconds

    def elapsed_time(self, end: LaggingEvent) -> float:
        """Return the milliseconds from this event to the event `end`, rounded to float32 like CUDA's.

        Raises:
            RuntimeError: one of the events was made without timing or has not happened yet, or they are on two GPUs.
        """
        self._gpu.raise_error()
        if self._number != end._number:
            raise RuntimeError("both events must be on the same GPU")
        if not self._timed or not end._timed:
            raise RuntimeError("both events must be created with enable_timing")
        if self.happened < self.recorded or end.happened < end.recorded or not end.recorded:
            raise RuntimeError("CUDA error: device not ready")
        return float(np.float32((end._nanoseconds - self._nanoseconds) / 1e6))


class Gpu:
    """The streams of one or several imitated GPUs. One lock guards all queues, events and running work.

    Args:
        seed: seed of the random order of work.
        fails_at: the number of the piece of work that fails, counted from 1; 0 for none.
        clock: returns the host's time in nanoseconds; the GPUs' clocks drift from it.

    Attributes:
        ran: number of pieces of work that ran so far.
        failed_at: the time of the failure on the host's clock; None without a failure.
        events: all events that still exist.
        events_made: number of events that were made so far.
        waits: number of times that the host has waited for a GPU.
        captures: number of graphs that were captured so far.
        replays: number of times that graphs were replayed so far.
        drained: number of times that each thread has waited for a stream to run empty, by the thread's name.
    """

    def __init__(self, seed: int = 0, fails_at: int = 0, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._clock = clock
        self.lock = threading.RLock()
        self.waits = 0
        self.captures = self.replays = 0
        self.drained: Counter[str] = Counter()
        self.random = Random(seed)
        self._fails_at = fails_at
        self.ran = 0
        self.failed_at: int | None = None
        self.events_made = 0
        self.events: weakref.WeakSet[LaggingEvent] = weakref.WeakSet()
        self._error: BaseException | None = None
        self._streams: list[LaggingStream] = []
        self._threads = threading.local()
        self._defaults: dict[int, LaggingStream] = {}

    @property
    def number(self) -> int:
        """The number of the calling thread's current GPU."""
        number: int = getattr(self._threads, "number", 0)
        return number

    @property
    def current(self) -> LaggingStream:
        """The calling thread's current stream on its current GPU."""
        return self.current_of(self.number)

    def current_of(self, number: int) -> LaggingStream:
        """Return the calling thread's current stream on GPU `number`: the default stream unless another was chosen."""
        chosen: LaggingStream | None = getattr(self._threads, f"stream {number}", None)
        if chosen is not None:
            return chosen
        with self.lock:
            if number not in self._defaults:
                self._defaults[number] = self.new_stream(number)
            return self._defaults[number]

    @contextmanager
    def on_gpu(self, number: int) -> Iterator[None]:
        """Make GPU `number` the calling thread's current one, while the context lasts."""
        before, self._threads.number = self.number, number
        try:
            yield
        finally:
            self._threads.number = before

    @contextmanager
    def on(self, stream: LaggingStream) -> Iterator[None]:
        """Make a stream and its GPU the calling thread's current ones, while the context lasts."""
        name = f"stream {stream.number}"
        before = getattr(self._threads, name, None)
        setattr(self._threads, name, stream)
        try:
            with self.on_gpu(stream.number):
                yield
        finally:
            setattr(self._threads, name, before)

    def choose(self, stream: LaggingStream) -> None:
        """Make a stream and its GPU the calling thread's current ones."""
        setattr(self._threads, f"stream {stream.number}", stream)
        self._threads.number = stream.number

    def new_stream(self, number: int = 0) -> LaggingStream:
        """Make a stream of GPU `number`; like CUDA's non-blocking streams, it does not wait for the default stream."""
        with self.lock:
            self._streams.append(LaggingStream(self, number))
            return self._streams[-1]

    def is_default(self, stream: LaggingStream) -> bool:
        """Test whether a stream is a GPU's default stream, which threads use until they choose another stream."""
        return stream in self._defaults.values()

    def synchronize(self, number: int) -> None:
        """Wait until all queues of the GPU with this number are empty."""
        for stream in self._streams:
            if stream.capture is not None and stream.number == number:
                raise stream.capture.refused()
        self.run_until(lambda: not any(each.queue for each in self._streams if each.number == number))

    def begin_capture(self, stream: LaggingStream, capture: Capture) -> None:
        """Make a stream record its work in `capture` instead of running it.

        Raises:
            RuntimeError: the stream captures already.
        """
        with self.lock:
            self.raise_error()
            if stream.capture is not None:
                raise stream.capture.refused()
            stream.capture = capture
            self.captures += 1

    def end_capture(self, stream: LaggingStream) -> None:
        """Make a stream run its work again instead of recording it."""
        with self.lock:
            stream.capture = None

    def replay(self, works: Sequence[Callable[[], object]]) -> None:
        """Queue captured work on the current stream."""
        stream = self.current
        if stream.capture is not None:
            raise stream.capture.refused(": graphs within graphs are not imitated")
        with self.lock:
            self.replays += 1
            for work in works:
                stream.enqueue(work)

    def refuse_unsafe(self) -> None:
        """Raise an error if a capture forbids the calling thread to make unsafe calls now.

        Raises:
            RuntimeError: a capture forbids such calls.
        """
        for stream in self._streams:
            if stream.capture is not None and stream.capture.forbids():
                raise stream.capture.refused()

    @property
    def queued(self) -> int:
        """The number of items in all queues."""
        with self.lock:
            return sum(len(stream.queue) for stream in self._streams)

    def nanoseconds(self, number: int) -> int:
        """Return the time on GPU `number`'s clock, in nanoseconds; odd GPUs' clocks are slow, even ones' are fast."""
        return int(self._clock() * (1 + (-DRIFT if number % 2 else DRIFT)))

    def lag(self) -> None:
        """Run the ready work of some streams, and let the others lag; each stream runs with probability `eagerness`."""
        for stream in self._streams:
            if self._error is None and stream.queue and self.random.random() < stream.eagerness:
                while stream.is_ready():
                    stream.run_head()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run the first items of ready queues, in random order, until `done()` is true.

        Raises:
            DeviceLost: a piece of work failed, now or before.
            RuntimeError: all streams wait for events that never happen, or the calling thread is capturing.
        """
        with self.lock:
            for stream in self._streams:
                if stream.capture is not None and stream.capture.is_of_this_thread():
                    raise stream.capture.refused()
            self.waits += 1
            self.raise_error()
            while not done():
                ready = [stream for stream in self._streams if stream.is_ready()]
                if not ready:
                    raise RuntimeError("the streams wait for events that never happen")
                self.random.choice(ready).run_head()
                self.raise_error()

    def run(self, work: Callable[[], object]) -> None:
        """Run one piece of work; if it raises an exception, later calls raise DeviceLost."""
        self.ran += 1
        try:
            if self.ran == self._fails_at:
                raise RuntimeError("device-side assert triggered")
            use_cores(1)  # bits may depend on their number, and any thread may run this
            with torch._C.DisableTorchFunction(), torch._C._InferenceMode(True):
                work()
        except Exception as error:
            self.failed_at = self._clock()
            self._error = error.with_traceback(None)  # it would keep the frames of whoever waited

    def raise_error(self) -> None:
        """Raise DeviceLost if a piece of work has failed."""
        if self._error is not None:
            raise DeviceLost(f"CUDA error: {self._error}") from self._error
