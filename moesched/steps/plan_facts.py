"""The facts that a plan gives to a policy: the model, the machine, the batch, and the free bytes of memories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.machines.group import numbered, written_out
from moesched.machines.machine import read_only
from moesched.models.layout import Page, WeightLayout, bytes_of
from moesched.models.operations import Operations
from moesched.requests.batch import Batch
from moesched.requests.chunks import Chunk
from moesched.steps.declarations import Declarations
from moesched.steps.memory import Memory
from moesched.steps.placed_weights import PlacedWeights
from moesched.steps.process import Process
from moesched.steps.reservations import Declared, KVPlan, NodeShare, Reservations
from moesched.steps.roles import Role, role_named
from moesched.system.cells import html_of
from moesched.system.plain_text import counted

VERBS_OF_A_LAYER = 20
"""Upper bound of the tasks of a layer, without those of its experts."""

AMPLE = 20
"""Factor by which the default limit of a step's tasks exceeds the most tasks that a policy needs."""


class PlanFacts(Declarations):
    """The properties of `Plan` that describe the model, the machine, the batch and free memory."""

    def __init__(
        self,
        machine: Machine,
        layout: WeightLayout,
        batch: Batch,
        budgets: Mapping[str, int] | None = None,
        slot_bytes: Callable[[Page], int] | None = None,
        nodes: int = 1,
        node: int = 0,
        *,
        pipelined: bool = False,
        process: Process | None = None,
    ) -> None:
        self.layout = layout
        self.batch = batch
        self.layers = range(layout.config.layers)
        self.micro_batches = range(len(batch.micro_batches))
        self.chunks: Mapping[int, Chunk] = batch.chunks()
        self.operations = Operations(layout.config, layout.dtype)
        self.slot_bytes = slot_bytes or bytes_of
        count = min(machine.accelerator_group.count, len(self.layers)) if pipelined else 1
        starts = [-(-stage * len(self.layers) // count) for stage in range(count + 1)]
        self.stages = tuple(map(range, starts, starts[1:]))
        self.machine = read_only(written_out(machine, count) if pipelined else machine)
        self.memories: Mapping[str, Memory] = MappingProxyType(
            _memories(machine, self.machine, budgets or {})
        )
        self.accelerators = tuple(self.memory("accelerator", stage) for stage in range(count))
        self.weights = PlacedWeights()
        super().__init__(
            Declared(
                in_flight=len(self.chunks),
                kv_roles=((None,) * len(self.layers),) * len(self.micro_batches),
                nodes=NodeShare(nodes, node),
            ),
            _default_task_limit(layout, len(self.chunks)),
        )
        self.reservations = Reservations(
            self.machine,
            layout,
            batch,
            self.chunks,
            self.operations,
            self.stages,
            self.slot_bytes,
            process=process,
        )
        self._seal()

    def __repr__(self) -> str:
        parts = len(self.micro_batches)
        sizes = f"{counted(len(self.batch.prompts), 'request')} in {parts} micro-batch{'' if parts == 1 else 'es'}"
        placed = sum(len(kept.slots) for kept in self.weights.resident)
        return f"<Plan: {self.layout.config.name} on {self.machine.name}, {sizes}, {placed} resident pages>"

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def kv(self) -> KVPlan:
        """The placement of the KV cache that the policy has declared so far."""
        return self.reservations.kv(self.declared)

    def memory(self, role: Role, stage: int = 0) -> Memory:
        """Return the memory of a role: "accelerator", "host" or "pinned".

        stage: number of the pipeline stage whose accelerator is meant; no effect on the other roles.

        Raises:
            BadInput: the machine has no pinned memory.
            PolicyError: there is no such role.
        """
        role, roles = role_named("memory", role, self.machine), self.machine.roles
        if role == "pinned":
            if roles.pinned is None:
                raise BadInput(
                    f"machine {self.machine.name} has no pinned memory, as {_without_staging(self.machine)}: "
                    "fetch pages directly where plan.machine.roles.pinned is None"
                )
            return self.memories[roles.pinned]
        processor = numbered(roles.accelerator, stage) if role == "accelerator" else roles.host
        return self.memories[self.machine.processors[processor].memory]

    def free(self, role: Role, stage: int = 0, given: Declared | None = None) -> int:
        """Return the bytes of a memory that are left for further declarations.

        The declarations so far take bytes, and so does what every policy needs. Activations count for all
        micro-batches unless `limit_in_flight` is declared. KV caches count as soon as they have a place.

        Args:
            role: the role of the memory that is asked about.
            stage: number of the pipeline stage whose accelerator's memory is meant.
            given: declarations to assume, such as `replace(plan.declared, in_flight=1)`; None for those so far. Pools
                and resident pages are always those declared so far.

        Raises:
            OverBudget: the declarations need more than the memory's budget.
        """
        memory = self.memory(role, stage)
        left = memory.free_bytes
        if self.declared.settled:
            return left
        for reservation in self.reservations.of(given or self.declared):
            if reservation.memory == memory.name:
                memory.require_free(
                    reservation.what, reservation.nbytes, left, reservation.parts, reservation.remedy
                )
                left -= reservation.nbytes
        for what, nbytes, parts in self.weights.claims(memory, left):
            memory.require_free(what, nbytes, left, parts)
            left -= nbytes
        return left


def _default_task_limit(layout: WeightLayout, micro_batches: int) -> int:
    """Return the default limit of a step's tasks: many times what a policy needs, so only endless loops reach it."""
    config = layout.config
    needed = len(layout.pages) + config.layers * (config.routed.experts + VERBS_OF_A_LAYER)
    return AMPLE * micro_batches * needed


def _without_staging(machine: Machine) -> str:
    """Return, in words for a message, the reason why a machine has no pinned memory."""
    return "accelerator and host share one" if machine.unified else "all of the host's is page-locked"


def _memories(machine: Machine, written: Machine, budgets: Mapping[str, int]) -> dict[str, Memory]:
    """Make a `Memory` with a budget for each memory of `written`, by name.

    Args:
        machine: the machine as in its profile; budgets can name only its memories.
        written: the plan's machine, in which each stage of a pipeline has an accelerator and a memory of its own. Each
            of these memories has the budget of the accelerator's memory in `machine`.
        budgets: bytes by name of memory; memories that are not named have their whole capacity.

    Raises:
        BadInput: a budget names no memory of the machine.
    """
    for name in budgets:
        if name not in machine.memories:
            raise BadInput(
                f"--budget names {name!r}, which machine {machine.name} does not have: "
                f"its memories are {', '.join(machine.memories)}"
            )
    fast = machine.accelerator.memory
    return {
        name: Memory(name, budgets.get(name if name in machine.memories else fast, tier.nbytes))
        for name, tier in written.memories.items()
    }
