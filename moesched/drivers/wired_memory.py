"""Computes the time to wire weights again after the accelerator's driver unwired them, on machines with one memory.

Wiring an array means mapping and holding its memory for the accelerator. On a machine whose accelerator and host share
one memory, weights must be wired before a kernel may read them. The driver unwires arrays that were idle for a while
(section 3.2 of the Apple silicon cluster paper, RACS'24, which calls this "driver processing"). An array is always
wired as a whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from moesched.machines import WiredMemory
from moesched.seams import Delay
from moesched.steps.plan import Plan
from moesched.tasks import Lane, Task

Array = tuple[Hashable, ...]
"""Key of an array of weights."""

EXPERT_VERBS = ("run_expert", "warm_expert")


class WiredPages:
    """Tracks the last use of each array of weights, and computes the time to wire an array again."""

    def __init__(self, wired_memory: WiredMemory) -> None:
        self._wired_memory = wired_memory
        self._idle = round(wired_memory.idle_seconds * 1e9)
        self._used: dict[Array, int] = {}
        self._began = -1

    def wire(self, array: Array, nbytes: int, now: int) -> int:
        """Return the nanoseconds from `now` until a kernel can use an array of `nbytes` bytes; 0 for a wired array."""
        if self._began < 0:
            self._began = now
        used = self._used.get(array)
        if used is None:
            if not self._wired_memory.standby:
                return round(nbytes / self._wired_memory.first_bandwidth * 1e9)
            used = self._began
        if now - used <= self._idle:
            return 0
        return round(nbytes / self._wired_memory.again_bandwidth * 1e9)

    def use(self, array: Array, until: int) -> None:
        """Record that a kernel uses a wired array until `until`, in nanoseconds."""
        self._used[array] = until


class WiredArrays:
    """Gives the extra time that the accelerator's tasks take to wire their weights: a `Delay` of the virtual driver.

    A prestacked expert has one array for all layers, any other expert one for each layer. The embedding is one array,
    and so is the LM head. All other weights have, in each layer, one array for each verb that reads them.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.machine.wired_memory is not None
        self._memory = WiredPages(plan.machine.wired_memory)
        self._prestacked = plan.machine.wired_memory.prestacked
        self._sizes = _sizes(plan, prestacked=self._prestacked)

    def __call__(self, task: Task, now: int) -> int:
        """Return the nanoseconds to wire the weights of a task that starts at `now`, and record their use."""
        array = self._array(task)
        if array is None:
            return 0
        wired_memory = self._memory.wire(array, self._sizes[array[0]], now)
        self._memory.use(array, now + wired_memory + task.work.nanoseconds)
        return wired_memory

    def _array(self, task: Task) -> Array | None:
        if task.verb in EXPERT_VERBS:
            return ("expert", task.expert) if self._prestacked else ("expert", task.expert, task.layer)
        if task.verb in self._sizes:
            return (task.verb, task.layer)
        return None


def wired_memory_delays(plan: Plan, lanes: Mapping[str, Lane]) -> dict[Lane, Delay]:
    """Return the functions that give tasks extra time for wiring, by lane; empty if no weights need wiring."""
    return {lanes["accelerator"]: WiredArrays(plan)} if plan.machine.wired_memory is not None else {}


def _sizes(plan: Plan, *, prestacked: bool) -> Mapping[Hashable, int]:
    """Return the bytes of an array of weights by its kind: "expert", or the verb that reads it.

    If the plan leaves attention to the first node, all other nodes have only experts.

    Args:
        prestacked: whether an expert's weights of all layers are one array.
    """
    operations, config = plan.operations, plan.layout.config
    output = operations.after_attention.nbytes
    vocabulary = config.vocabulary * operations.hidden_bytes
    experts = operations.expert_bytes * (config.layers if prestacked else 1)
    if not plan.nodes.attends:
        return {"expert": experts}
    return {
        "expert": experts,
        "pre_attention": operations.before_attention.nbytes,
        "route": output + operations.routing.nbytes + operations.shared_experts.nbytes,
        "post_attention": output + config.routed.experts * operations.expert_bytes,
        "embed": vocabulary,
        "sample": vocabulary,
    }
