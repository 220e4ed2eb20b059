"""Captured kernels: if the calls of a bound kernel repeat, one is captured as a CUDA graph, which later ones replay.

A bound kernel is a function that runs a kernel with certain weights and memory. A graph contains the addresses and
numbers of the call that was captured, so it can replace only calls with the same addresses and numbers. Numbers that
differ from step to step, such as the lengths of sequences, are therefore in the accelerator's memory; they are copied
there ahead of the call on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from moesched.models.replayed import MOST_GRAPHS
from moesched.system.logs import Log

from ..kernels.seam import Bound

WARM_CALLS = 2
"""Equal calls that run before one is captured: they load kernels, and allocate memory that later calls reuse."""

SEQUENCES = (tuple, list)
"""The types of arguments that contain tensors; a constant, as each evaluation of `tuple | list` makes a new object."""

_log = Log(__name__)


class Graphs:
    """The CUDA graphs of a device, which share a pool of memory for what their kernels allocate.

    Args:
        most: the largest number of graphs at a time; calls without a graph are launched kernel by kernel.

    Attributes:
        count: number of calls that were captured so far.
        refusal: the reason why no more calls are captured; empty while calls are captured.
    """

    def __init__(self, device: torch.device, most: int = MOST_GRAPHS) -> None:
        self._most = most
        self._live: WeakSet[Captured] = WeakSet()
        """The kernels that have a graph."""
        self._module: Any = torch.get_device_module(device)
        self._pool: Any = None
        self._stream: Any = None
        """The stream for captures; other threads use the streams that calls run on."""
        self._first: Any = None
        """The first graph, kept because torch shares memory among graphs only as long as one of them exists."""
        self._ways: list[str] = []
        self.count = 0
        self.refusal = ""

    @property
    def used(self) -> Mapping[str, Sequence[str]]:
        """The kinds of graphs captured so far, under the key "replay": {"replay": ["CUDA graphs"]}, for example.

        The mapping is empty if no call was captured. After a failed capture, the list has only a sentence with the
        reason of the failure.
        """
        if self.refusal:
            return {"replay": [f"launches, as a capture failed: {self.refusal}"]}
        return {"replay": self._ways} if self._ways else {}

    def capture(self, owner: Captured, run: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Capture one call of a kernel in a graph: the call is recorded without being run.

        Args:
            owner: the kernel that will replay the graph.
            run: makes the call.

        Returns:
            the graph and the call's result; None if a capture failed, now or before, or if there are too many graphs.
        """
        if self.refusal or len(self._live) >= self._most:
            return None
        try:
            if self._stream is None:
                self._stream, self._pool = self._module.Stream(), self._module.graph_pool_handle()
            graph = self._module.CUDAGraph()
            with self._module.stream(self._stream):
                # Threads of other lanes may allocate meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
        except Exception as error:  # of any library; the call that follows raises its own again
            self._refuse(error)
            return None
        self._first = self._first or graph
        self._live.add(owner)
        self.count += 1
        if owner.way not in self._ways:
            self._ways.append(owner.way)
        return graph, result

    def drop(self, owner: Captured) -> None:
        """Note that a kernel has dropped its graph, which makes room for another."""
        self._live.discard(owner)

    def _refuse(self, error: Exception) -> None:
        self.refusal = str(error).partition("\n")[0]
        _log.warning("kernels are launched one by one from now on, as a capture failed", reason=self.refusal)


class Captured:
    """A wrapper of a bound kernel (a function) that replays a CUDA graph once calls with equal arguments repeat.

    The first few calls with the same arguments call `run`; then such a call is captured, and later ones replay its
    graph. If the arguments change after few replays, the next capture waits for twice as many equal calls.

    Args:
        run: the bound kernel that is wrapped.
        graphs: the device's graphs.
        way: the name of this kind of graph in `Graphs.used`.
    """

    __slots__ = (
        "__weakref__",
        "_calls",
        "_graph",
        "_graphs",
        "_held",
        "_identity",
        "_result",
        "_run",
        "_warm",
        "way",
    )

    def __init__(self, run: Bound, graphs: Graphs, way: str = "CUDA graphs") -> None:
        self.way = way
        self._run = run
        self._graphs = graphs
        self._warm = WARM_CALLS
        self._identity: list[Any] | None = None
        self._calls = 0
        self._graph: Any = None
        self._result: Any = None
        self._held: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        identity = identities(arguments)
        if identity != self._identity:
            self._begin(identity)
        self._calls += 1
        if self._graph is None and (self._calls <= self._warm or not self._capture(arguments)):
            return self._run(*arguments)
        self._graph.replay()
        return self._result

    def _begin(self, identity: list[Any]) -> None:
        """Begin to count calls with new arguments from 0, and drop the graph for earlier arguments, if there is one.

        identity: the new arguments, in the form that `identities` returns.
        """
        if self._graph is not None:
            self._graphs.drop(self)
            if self._calls < 4 * self._warm:
                self._warm *= 2
        self._identity = identity
        self._calls = 0
        self._graph = self._result = None
        self._held = ()

    def _capture(self, arguments: tuple[Any, ...]) -> bool:
        captured = self._graphs.capture(self, partial(self._run, *arguments))
        if captured is None:
            return False
        self._graph, self._result = captured
        self._held = arguments  # a graph keeps no memory alive
        return True


def repeated(arguments: Sequence[Any], before: Sequence[Any]) -> bool:
    """Test whether a graph of a call with the arguments `before` can be replayed for a call with `arguments`.

    It can if the `identities` of both are equal. Most arguments are the same objects, for which the test is fast.
    """
    if len(arguments) != len(before):
        return False
    for each, other in zip(arguments, before, strict=True):
        if each is not other and not (
            repeated(each, other)
            if isinstance(each, SEQUENCES) and isinstance(other, SEQUENCES)
            else identities((each,)) == identities((other,))
        ):
            return False
    return True


def identities(arguments: Iterable[Any]) -> list[Any]:
    """Convert a call's arguments to a list; calls with equal lists can replay the same graph.

    The list has the addresses of all tensors, also of those in nested sequences, and all other arguments as they are.
    """
    found: list[Any] = []
    for each in arguments:
        if isinstance(each, torch.Tensor):
            found.append(each.data_ptr())
        elif isinstance(each, SEQUENCES):
            found += identities(each)
        else:
            found.append(each)
    return found
