"""Fixed decode steps: one graph launches a whole step ahead of its tasks, which find their results ready.

The first task launches the calls of the step before, which is right if all tasks make the same calls again. Each task
compares its own. A task that makes another call first launches those before it once more, one by one: they read numbers
and a KV cache that no later call of the step changes, so that all results are again as that task needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..kernels.memory import Memory
from ..kernels.seam import Bound
from .captured import Captured, Graphs, identities

FIRST, OF_A_LAYER, LAST = "embed", ("attention_inputs", "attention", "moe_layer"), "greedy"
"""Operations of a fixed step. Nothing else may compute between them; a step whose tokens are drawn has no last one."""


class Call:
    """A call of a bound kernel."""

    __slots__ = ("_alone", "_arguments", "_identity", "_run", "operation")

    def __init__(self, operation: str, run: Bound, alone: Captured, arguments: tuple[Any, ...]) -> None:
        self.operation = operation
        self._run = run
        self._alone = alone
        self._arguments = arguments
        self._identity = identities(arguments)

    def repeats(self, other: Call) -> bool:
        """Test whether it is the same call, with the same addresses and numbers."""
        return self._alone is other._alone and self._identity == other._identity

    def launch(self) -> Any:
        """Launch its kernels."""
        return self._run(*self._arguments)

    def replay(self) -> Any:
        """Launch its kernels, or replay its own graph."""
        return self._alone(*self._arguments)


class Calls:
    """The calls of one step, in order; other objects are other steps."""

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self.made = list(calls)

    def launch(self) -> list[Any]:
        """Launch all of them; returns their results."""
        return [call.launch() for call in self.made]


class FixedStep:
    """The decode step of a micro-batch, while its memory and its requests' number stay.

    Args:
        layers: number of layers that a step has.
    """

    def __init__(self, graphs: Graphs, layers: int) -> None:
        self._operations = [FIRST, *OF_A_LAYER * layers]
        self._whole = Captured(Calls.launch, graphs, "CUDA graphs of steps")
        self._calls = Calls()
        """Those of this step so far, or, while it is launched ahead, of the whole step."""
        self._results: Sequence[Any] = ()
        """Those of all calls that were launched ahead."""
        self._asked = 0
        """Number of these calls that tasks have made."""

    def call(self, call: Call) -> Any:
        """The result of a call, which is launched now, or was launched with the whole step."""
        if call.operation == FIRST:
            self._begin(call)
        if self._results:
            if self._asked < len(self._results) and call.repeats(self._calls.made[self._asked]):
                self._asked += 1
                return self._results[self._asked - 1]
            self._go_on_alone()
        self._calls.made.append(call)
        return call.replay()

    def _begin(self, call: Call) -> None:
        """Begin a step, and launch all of it if the step before was whole and began alike."""
        self._asked = 0
        if self._is_whole() and call.repeats(self._calls.made[0]):
            self._results = self._whole(self._calls)
        else:
            self._record_only(0)

    def _go_on_alone(self) -> None:
        """Launch once more what tasks have asked for, if other calls followed, and nothing ahead of the next tasks."""
        too_far = self._asked < len(self._results)
        self._record_only(self._asked)
        if too_far:
            self._calls.launch()

    def _is_whole(self) -> bool:
        made = [call.operation for call in self._calls.made]
        return made in (self._operations, [*self._operations, LAST])

    def _record_only(self, calls: int) -> None:
        """Record the step from now on, after its first calls."""
        self._calls = Calls(self._calls.made[:calls])
        self._results = ()


class InStep:
    """A bound kernel whose calls may be part of a fixed step."""

    def __init__(self, operation: str, run: Bound, graphs: Graphs, step: FixedStep) -> None:
        self._of = operation, run, Captured(run, graphs)
        self._step = step

    def __call__(self, *arguments: Any) -> Any:
        return self._step.call(Call(*self._of, arguments))


class Replays:
    """Has kernels of one device replayed, in a graph of their own or in that of a fixed step.

    Attributes:
        graphs: the device's graphs.
        layers: number of layers of a step, if nothing but the accelerator's own tasks computes it; otherwise 0.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.layers = 0

    def captured(self, run: Bound, operation: str, memory: Memory) -> Bound:
        """Return a bound kernel that is replayed where its calls repeat.

        run: launches kernels alone; equal arguments give results in the same memory.
        """
        if not (self.layers and memory.kept):
            return Captured(run, self.graphs)
        if memory.step is None:
            memory.step = FixedStep(self.graphs, self.layers)
        return InStep(operation, run, self.graphs, memory.step)
