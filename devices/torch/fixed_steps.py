"""Fixed decode steps: one CUDA graph launches all calls of a step before the step's tasks ask for the results.

If the first task of a step makes the same call as in the previous step, all calls of the previous step are launched
anew, in the expectation that this step makes the same calls. Each further task compares its call with the one that was
launched for it. If they differ, the calls of the tasks before it are launched a second time, one by one, and the rest
of the step runs task by task. The second launch restores results that later calls may have overwritten. It computes the
same: these calls read only each other's results, numbers that were copied to the accelerator before the first launch,
and layers of the KV cache that no later call of the step changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..kernels.seam import Bound
from ..kernels.workspace import Workspace
from .captured import Captured, Graphs, repeated

FIRST, OF_A_LAYER, LAST = "embed", ("attention_inputs", "attention", "moe_layer"), "greedy"
"""The operations of a fixed step, in order; a step whose tokens are sampled on the host has no last one."""


class Call:
    """A call that a step makes of a bound kernel, with its arguments.

    Args:
        operation: name of the operation that the kernel computes.
        run: the bound kernel.
        alone: a wrapper of the same kernel, which replays a graph of just this call.
        arguments: the kernel's arguments.
    """

    __slots__ = ("_alone", "_arguments", "_run", "operation")

    def __init__(self, operation: str, run: Bound, alone: Captured, arguments: tuple[Any, ...]) -> None:
        self.operation = operation
        self._run = run
        self._alone = alone
        self._arguments = arguments

    def is_repeated(self, alone: Captured, arguments: tuple[Any, ...]) -> bool:
        """Test whether a call of `alone` with `arguments` has the same kernel, addresses and numbers as this call."""
        return self._alone is alone and repeated(arguments, self._arguments)

    def launch(self) -> Any:
        """Launch the call's kernels one by one; returns the call's result."""
        return self._run(*self._arguments)

    def replay(self) -> Any:
        """Replay a graph of this call alone, or launch its kernels until there is one; returns the call's result."""
        return self._alone(*self._arguments)


class Calls:
    """The calls of one step, in order. Two objects never compare equal, so that each gets a graph of its own."""

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self.made = list(calls)

    def launch(self) -> list[Any]:
        """Launch the kernels of all calls one by one; returns the calls' results in order."""
        return [call.launch() for call in self.made]


class FixedStep:
    """The decode steps of a micro-batch with a certain number of rows, launched ahead as long as their calls repeat.

    Args:
        graphs: the device's graphs.
        layers: number of the model's layers.
    """

    def __init__(self, graphs: Graphs, layers: int) -> None:
        self._operations = [FIRST, *OF_A_LAYER * layers]
        self._whole = Captured(Calls.launch, graphs, "CUDA graphs of steps")
        self._calls = Calls()
        """The calls of this step so far; of the whole step if it was launched ahead."""
        self._results: Sequence[Any] = ()
        """The results of all calls that were launched ahead; empty if the step runs task by task."""
        self._asked = 0
        """Number of the calls launched ahead that tasks have asked for by now."""

    def call(self, operation: str, run: Bound, alone: Captured, arguments: tuple[Any, ...]) -> Any:
        """Make the next call of this step; returns the call's result. The arguments are those of `Call`.

        If the step was launched ahead, the result is there already.
        """
        if operation == FIRST:
            self._begin(alone, arguments)
        if self._results:
            asked = self._asked
            if asked < len(self._results) and self._calls.made[asked].is_repeated(alone, arguments):
                self._asked = asked + 1
                return self._results[asked]
            self._go_on_alone()
        call = Call(operation, run, alone, arguments)
        self._calls.made.append(call)
        return call.replay()

    def _begin(self, alone: Captured, arguments: tuple[Any, ...]) -> None:
        """Begin a step with its first call; the arguments are those of `Call`.

        If the previous step was complete and began with an equal call, all its calls are launched ahead in one graph.
        """
        self._asked = 0
        if self._is_whole() and self._calls.made[0].is_repeated(alone, arguments):
            self._results = self._whole(self._calls)
        else:
            self._record_only(0)

    def _go_on_alone(self) -> None:
        """Stop using results that were launched ahead, and make the rest of the step's calls one by one.

        If more calls were launched ahead than tasks have asked for, those asked for are launched again: the later calls
        may have overwritten their results.
        """
        too_far = self._asked < len(self._results)
        self._record_only(self._asked)
        if too_far:
            self._calls.launch()

    def _is_whole(self) -> bool:
        made = [call.operation for call in self._calls.made]
        return made in (self._operations, [*self._operations, LAST])

    def _record_only(self, calls: int) -> None:
        """Forget results that were launched ahead, and all recorded calls of the step except the first `calls`."""
        self._calls = Calls(self._calls.made[:calls])
        self._results = ()


class InStep:
    """A bound kernel whose calls are part of a micro-batch's decode step; the step may have launched them ahead.

    Args:
        operation: name of the operation that the kernel computes.
        run: the bound kernel itself.
        graphs: the device's graphs.
        step: the decode step.
    """

    def __init__(self, operation: str, run: Bound, graphs: Graphs, step: FixedStep) -> None:
        self._of = operation, run, Captured(run, graphs)
        self._step = step

    def __call__(self, *arguments: Any) -> Any:
        return self._step.call(*self._of, arguments)


class Replays:
    """Wraps a device's bound kernels so that graphs replay their calls: a graph for each call, or one for a whole step.

    Attributes:
        graphs: the device's graphs.
        layers: number of the model's layers if whole decode steps are replayed; 0 if calls are replayed one by one.
            Whole steps are replayed only if the accelerator alone computes them.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.layers = 0

    def captured(self, run: Bound, operation: str, memory: Workspace) -> Bound:
        """Wrap a bound kernel so that calls with repeated arguments are replayed; see `Captured`.

        Args:
            run: the bound kernel; it must only launch kernels, and with equal arguments write its results to the same
                memory.
            operation: name of the operation that the kernel computes.
            memory: the memory for results that the kernel is bound to.
        """
        if not (self.layers and memory.kept):
            return Captured(run, self.graphs)
        if memory.step is None:
            memory.step = FixedStep(self.graphs, self.layers)
        return InStep(operation, run, self.graphs, memory.step)
