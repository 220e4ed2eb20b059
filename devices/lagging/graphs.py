"""Imitated CUDA graphs: a stream records its work instead of running it; each replay queues the recorded work again.

A graph knows addresses, not tensors: a replay reads and writes the memory of the captured calls, whatever that memory
contains by then. As with CUDA, some calls are refused while a stream captures, and break the capture. Among them are
waits of the host, queries of events, and allocations on other streams that need more memory from the system. A wait
for an event is refused, too, if the event was recorded outside the capture and the wait is inside it, or the reverse.
"""

from __future__ import annotations

import weakref
from typing import Any

from .captures import Capture
from .streams import Gpu, LaggingStream

MODES = ("global", "thread_local")


class GraphPool:
    """A memory pool of graphs: calls that are being captured allocate from it."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[LaggingGraph] = weakref.WeakSet()
        self._is_new = True

    def add(self, graph: LaggingGraph) -> None:
        """Add a graph to the users of the pool.

        Raises:
            RuntimeError: the pool was used before and no graph uses it now, so that torch may have freed its memory.
        """
        if not (self._is_new or self.is_live):
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._is_new = False
        self._graphs.add(graph)

    def discard(self, graph: LaggingGraph) -> None:
        """Remove a graph from the users of the pool."""
        self._graphs.discard(graph)

    @property
    def is_live(self) -> bool:
        """True while a graph uses the pool; torch does not free the pool's memory meanwhile."""
        return len(self._graphs) > 0


class LaggingGraph:
    """Imitates `torch.cuda.CUDAGraph`: captures the work of the current stream, and replays it.

    Args:
        gpu: the GPU whose streams the graph captures and replays on.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._capture: Capture | None = None
        self._stream: LaggingStream | None = None
        self._pool: GraphPool

    def capture_begin(self, pool: GraphPool | None = None, capture_error_mode: str = "global") -> None:
        """Make the current stream record its work, until `capture_end`.

        Args:
            pool: the memory pool that captured calls allocate from; None makes a new pool for this graph.
            capture_error_mode: the threads that may not make unsafe calls, such as allocations, until `capture_end`:
                "global" for all threads, "thread_local" for the calling one.

        Raises:
            RuntimeError: the current stream is a default stream, or captures already, or all graphs of the pool are
                gone.
        """
        stream = self._gpu.current
        if self._gpu.is_default(stream):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if capture_error_mode not in MODES:
            raise RuntimeError(f"the mode {capture_error_mode} is not imitated: give one of {MODES}")
        self._pool = pool or GraphPool()
        self._pool.add(self)
        self._capture = Capture(self._pool, capture_error_mode)
        self._gpu.begin_capture(stream, self._capture)
        self._stream = stream

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            RuntimeError: a call since `capture_begin` was refused.
        """
        assert self._stream is not None and self._capture is not None, "a capture has begun"
        self._gpu.end_capture(self._stream)
        self._stream = None
        if self._capture.broken:
            self.reset()
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        """Queue the captured work on the current stream.

        Raises:
            RuntimeError: nothing is captured, or memory of the captured calls was freed.
        """
        capture = self._capture
        if capture is None or self._stream is not None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if capture.freed():
            raise RuntimeError("CUDA error: an illegal memory access: a graph uses memory that was freed")
        self._gpu.replay(capture.works)

    def reset(self) -> None:
        """Forget the captured work; the graph no longer uses its memory pool, which other graphs may share."""
        if self._capture is not None:
            self._pool.discard(self)
            self._capture = None

    def pool(self) -> Any:
        """Return the graph's memory pool, for the `capture_begin` of another graph that shares it."""
        assert self._capture is not None, "it is captured"
        return self._pool
