"""Weights that the accelerator's driver unwires when they lie idle, and wires again when a kernel asks for them.

On a machine whose memory accelerator and host share, weights must be wired before a kernel may read them, and the
driver lets go of arrays that were not used for a while (section 3.2 of the Apple silicon cluster paper, RACS'24,
which calls it driver processing). An array is wired as a whole, however little of it is used.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from moesched.machines import WiredMemory
from moesched.seams import Delay
from moesched.steps.plan import Plan
from moesched.tasks import Lane, Task

Array = tuple[Hashable, ...]
"""The name of an array of weights."""

EXPERT_VERBS = ("run_expert", "warm_expert")


class WiredPages:
    """When arrays were used last, and what it takes to use one now."""

    def __init__(self, wired_memory: WiredMemory) -> None:
        self._wired_memory = wired_memory
        self._idle = round(wired_memory.idle_seconds * 1e9)
        self._used: dict[Array, int] = {}
        self._began = -1

    def wire(self, array: Array, nbytes: int, now: int) -> int:
        """Nanoseconds that pass before a kernel can use an array of so many bytes."""
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
        """A kernel uses an array, which was wired before."""
        self._used[array] = until


class WiredArrays:
    """What the accelerator's tasks of a run take longer, since weights have to be wired: a `Delay`.

    What lies in one array: of an expert, all layers where they are prestacked, else one layer; of what every token
    needs, attention's projections and router of a layer, the embedding, and the LM head.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.machine.wired_memory is not None
        self._memory = WiredPages(plan.machine.wired_memory)
        self._prestacked = plan.machine.wired_memory.prestacked
        self._sizes = _sizes(plan, prestacked=self._prestacked)

    def __call__(self, task: Task, now: int) -> int:
        """Nanoseconds of wiring before the task."""
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
    """What makes tasks of a machine's lanes longer, by lane; nothing where weights are at hand in any case."""
    return {lanes["accelerator"]: WiredArrays(plan)} if plan.machine.wired_memory is not None else {}


def _sizes(plan: Plan, *, prestacked: bool) -> Mapping[Hashable, int]:
    """Bytes of an array by what it is of: experts, or the verb that uses it, which not all nodes have."""
    operations, config = plan.operations, plan.layout.config
    query, key, element = operations.query_width, operations.key_width, operations.element
    vocabulary = config.vocabulary * operations.hidden_bytes
    experts = operations.expert_bytes * (config.layers if prestacked else 1)
    if not plan.nodes.attends:
        return {"expert": experts}
    return {
        "expert": experts,
        "pre_attention": config.hidden * (query + 2 * key) * element,
        "route": config.hidden * (query + config.experts) * element,
        "post_attention": config.hidden * query * element + config.experts * operations.expert_bytes,
        "embed": vocabulary,
        "sample": vocabulary,
    }
