"""The plan of a run: everything that a policy decides before the first step.

A policy gets a Plan that describes the model, the machine and the batch. In it the policy declares where the KV cache
is, which pages stay in fast memory, which pools the others stream through, and how lanes issue tasks. The order of
declarations does not matter: memory is reserved when all are known, and each reservation is checked against the
memory's budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from moesched.errors import BadInput, PolicyError
from moesched.models.layout import Page
from moesched.steps.claims import claim_of_slots
from moesched.steps.declarations import require_slots, require_whole
from moesched.steps.eviction import Eviction
from moesched.steps.fixed_pages import FixedPages
from moesched.steps.memory import Memory, Pool, Replacement
from moesched.steps.model_pages import describe, require_list, require_pages
from moesched.steps.node_experts import require_placement, require_routers
from moesched.steps.plan_facts import PlanFacts
from moesched.steps.roles import KV_ROLES, Role, role_named
from moesched.steps.ruled_pool import RuledPool
from moesched.system.source_lines import calling_line


class Plan(PlanFacts):
    """The object in which a policy declares its use of memory, and which describes the model, machine and batch.

    Args:
        machine: the machine; the budget of a memory that `budgets` does not name is its whole capacity.
        layout: the model's weights, cut into pages.
        batch: the requests.
        budgets: bytes by memory name.
        slot_bytes: returns the bytes that a page takes in a slot of the device; None for the page's own bytes.
        nodes: number of machines that share the model's experts.
        node: this machine's index among them, from 0.
        pipelined: whether layers are divided into stages, one for each of the machine's equal accelerators. With L
            layers and S stages, layer i belongs to stage i * S // L. A page goes to the accelerator of its layer's
            stage, and the first verb of a stage moves a micro-batch's hidden state there.
        process: the process that will run the plan; None where that is not known.

    Attributes:
        machine: the machine; with several stages, each accelerator is listed with a memory and links of its own.
        layout: the model's weights, cut into pages: `layout.pages`, or the pages of a layer, dense part or expert.
        batch: the requests: the lengths of their prompts, and the number of new tokens.
        layers: the numbers of the layers, from 0.
        micro_batches: the numbers of the micro-batches of decode steps, from 0.
        chunks: the micro-batches of prefill; more than `micro_batches` where long prompts are cut.
        operations: FLOPs and bytes of the model's operations, and sizes of their data.
        stages: the layers of each pipeline stage; without a pipeline there is one stage with all layers.
        slot_bytes: returns the bytes that a page takes in a slot of the device.
        memories: all memories by name.
        accelerators: the accelerators' memories by stage.
        weights: for the framework: the pages that stay in each memory, and the pools.
        reservations: for the framework: computes the bytes that the declarations need.
    """

    def limit_in_flight(self, micro_batches: int) -> None:
        """Declare that in prefill at most `micro_batches` are within a layer at once; by default all of them may be.

        A micro-batch is within a layer from its `pre_attention` to its `post_attention` or `combine`, or to a later
        `offload_kv`. The fewer micro-batches are within a layer, the less memory their activations need.

        Raises:
            PolicyError: `micro_batches` is no integer, or another limit was declared.
        """
        micro_batches = require_whole("limit_in_flight", micro_batches)
        every, before = len(self.chunks), self.declared.in_flight
        limit = min(every, max(1, micro_batches))
        if before not in (every, limit):
            raise PolicyError(
                f"limit_in_flight: the limit is {before} already: declare one limit, not {limit}"
            )
        self._declare("limit_in_flight", replace(self.declared, in_flight=limit))

    def place_kv(
        self, role: Role, micro_batches: Iterable[int] | None = None, layers: Iterable[int] | None = None
    ) -> None:
        """Have a memory hold the KV cache of some micro-batches in some layers.

        In a pipeline, each accelerator holds the cache of its own layers.

        Args:
            role: the memory: "accelerator" or "host".
            micro_batches: numbers of the micro-batches; by default all.
            layers: numbers of the layers; by default all.

        Raises:
            PolicyError: there is no such micro-batch or layer; a cache has a place already; or the memory cannot hold
                KV caches. Also if the run searches with beams and only some layers are named, since beams' caches are
                not divided by layer.
        """
        role = role_named("place_kv", role, self.machine, KV_ROLES)
        chosen = None if layers is None else frozenset(layers)
        if chosen is not None:
            if beyond := chosen.difference(self.layers):
                raise PolicyError(
                    f"place_kv: there is no L{min(beyond)}: layers go from 0 to {len(self.layers) - 1}"
                )
            if self.batch.beams > 1 and chosen and len(chosen) < len(self.layers):
                raise PolicyError("place_kv: beams share their KV cache, which is undivided: omit layers")
        roles = list(self.declared.kv_roles)
        for number in self.micro_batches if micro_batches is None else micro_batches:
            if number not in self.micro_batches:
                raise PolicyError(
                    f"place_kv: there is no mb{number}: micro-batches go from 0 to {len(roles) - 1}"
                )
            roles[number] = _placed(roles[number], role, number, chosen)
        self._declare("place_kv", replace(self.declared, kv_roles=tuple(roles)))

    def reserve_kv_buffers(self, slots: int) -> None:
        """Reserve buffers on each accelerator for keys and values that `Step.load_kv` brings from the host's KV cache.

        slots: number of buffers of each stage, each for the keys and values of one micro-batch in one layer. Where the
            accelerator holds the whole cache, none are reserved.

        Raises:
            PolicyError: `slots` is no integer, or below 0; or another number was declared.
        """
        slots = require_whole("reserve_kv_buffers", slots, least=0)
        before = self.declared.kv_buffers
        if before not in (0, slots):
            raise PolicyError(
                f"reserve_kv_buffers: {before} are declared already: declare one number, not {slots}"
            )
        self._declare("reserve_kv_buffers", replace(self.declared, kv_buffers=slots))

    def run_experts_on_host(self, *, resident: bool = False) -> None:
        """Have the host run experts as well, from weights in its own memory.

        If weights come from the host's memory, the host may run all experts that do not stay on an accelerator;
        otherwise, those that `keep` placed on the host. Memory is reserved for the rows that go to the host and the
        outputs that come back.

        resident: whether the host may also run experts that stay on an accelerator. This has no effect unless weights
            come from the host's memory, and the accelerator has a memory of its own.
        """
        both = resident and self.machine.weights_on_host and not self.machine.unified
        both = both or self.declared.resident_experts_on_host
        declared = replace(self.declared, experts_on_host=True, resident_experts_on_host=both)
        self._declare("run_experts_on_host", declared)

    def request_times(self) -> None:
        """Have steps answer questions about time: `arrived`, `seconds_until` and `seconds_until_idle`.

        Raises:
            BadInput: several ranks or nodes run the policy; their decisions must be equal, and their clocks differ.
        """
        if self.layout.config.ranks > 1 or self.nodes.count > 1:
            raise BadInput(
                "the policy decides by the time, and the clocks of several ranks or nodes differ: use "
                "--tensor-parallel 1 and one node, or another policy"
            )
        self._declare("request_times", replace(self.declared, times=True))

    def place_experts(self, placement: Sequence[Collection[int]], *, centralised: bool = False) -> None:
        """Declare which experts each node holds, in all layers.

        This node's experts stay in its accelerator's memory, and so do the dense pages if the node attends.

        Args:
            placement: for each node, the numbers of its experts.
            centralised: False if every node computes attention, router and sampling, with equal results. True if only
                the first node does: it sends each layer's routed rows to the other nodes, and adds up the outputs of
                their experts (section 3.2 of the paper on a cluster of Apple silicon, RACS'24).

        Raises:
            PolicyError: the placement is for other nodes or experts, no node holds one of the experts, experts were
                placed already, or the plan is centralised and requests router scores.
            BadInput: the plan is centralised, and the run searches with beams.
        """
        if self.nodes.placement:
            raise PolicyError("place_experts: experts were placed already: place them once")
        require_placement(placement, self.nodes.count, self.layout.config.routed.experts)
        if centralised and self.batch.beams > 1:
            raise BadInput(
                "beam search needs every node to attend: use --set decentralised=true, or --beams 1"
            )
        nodes = replace(
            self.nodes,
            placement=tuple(frozenset(map(int, held)) for held in placement),
            centralised=centralised,
        )
        declared = replace(self.declared, nodes=nodes)
        require_routers("place_experts", declared)
        self._declare("place_experts", declared)

    def pool(
        self,
        role: Role,
        name: str,
        slots: int,
        pages: Sequence[Page],
        replacement: Replacement | Eviction | type[Eviction] = "ring",
        filled: Sequence[Page] = (),
    ) -> Pool:
        """Declare a pool of `slots` slots, each large enough for any of `pages`.

        Args:
            role: the memory that the pool is in.
            name: the pool's name in messages and reports.
            replacement: the page that is evicted to make room for another one: the oldest ("ring"), the least recently
                used ("lru"), or the one that an `Eviction` chooses, given as a class or as an object that no other pool
                has; with "none", the policy evicts pages itself.
            filled: pages that are in the pool before the first step; they are loaded after those given to `keep`.

        Raises:
            PolicyError: there is no such memory or rule; the memory has a pool of this name already; or the slots are
                too few or too small for the pages in `filled`. Also if the pool is in an accelerator's memory, and its
                pages belong to several stages. Also if the rule is an object that another pool has, or had in an
                earlier run.
            OverBudget: the slots need more bytes than the memory's budget.
        """
        self._declare("pool", self.declared)
        pages, filled = require_list("pool", pages), require_list("pool", filled)
        require_pages("pool", pages, self.layout)
        largest = max((page.nbytes for page in pages), default=0)
        require_pages("pool", filled, self.layout, largest)
        slots = require_slots(name, slots, len(filled), replacement)
        memory = self._memory_for("pool", pages, role)
        others = [each.name for each in self.weights.pools if each.memory is memory and each.slots]
        if slots and name in others:  # a stage that streams nothing may have a pool without slots
            raise PolicyError(f"pool: {memory.name} has a pool {name} already: give each its own name")
        size = max((self.slot_bytes(page) for page in pages), default=0)
        what, nbytes, parts = claim_of_slots(name, slots, size)
        memory.require_free(what, nbytes, memory.capacity, parts)  # before there is an object for each slot
        make = Pool if isinstance(replacement, str) else RuledPool
        pool = make(name, memory, slots, size, replacement, largest, calling_line())
        self.weights.add_pool(pool, filled)
        return pool

    def keep(self, pages: Sequence[Page], role: Role = "accelerator") -> FixedPages:
        """Declare pages that stay in the memory `role` for the whole run; they are loaded before the first step.

        Raises:
            PolicyError: the pages belong to several stages, and `role` is "accelerator"; or one of them is named twice,
                or kept in that memory already.
        """
        self._declare("keep", self.declared)
        pages = require_list("keep", pages)
        require_pages("keep", pages, self.layout)
        memory = self._memory_for("keep", pages, role)
        times = Counter(page.id for page in pages)
        if twice := next((page for page in pages if page in memory or times[page.id] > 1), None):
            raise PolicyError(f"keep: page {describe(twice)} stays in {memory.name} already: keep each once")
        return self.weights.keep(memory, pages, list(map(self.slot_bytes, pages)))

    def check(self) -> None:
        """Reserve the memory for everything that was declared; nothing can be declared afterwards.

        Raises:
            PolicyError: no place was declared for the KV cache of a micro-batch.
            OverBudget: the declarations need more of a memory than its budget.
        """
        declared = self.declared
        if declared.settled:
            return
        unplaced = [number for number, roles in enumerate(declared.kv_roles) if None in roles]
        if unplaced:
            placed = any(any(roles) for roles in declared.kv_roles)
            whose = f" of mb{unplaced[0]}" if placed else ""
            raise PolicyError(
                f"the plan has no place for the KV cache{whose}: call plan.place_kv('accelerator' or 'host')"
            )
        for each in self.reservations.of(declared):
            self.memories[each.memory].reserve(each.what, each.nbytes, each.parts, each.remedy)
        self.weights.reserve()
        self._declared = replace(declared, settled=True)
        host, pages = self.memory("host"), self.nodes.pages(self.layout)
        if self.nodes.placement:
            self.weights.hold(self.memory("accelerator"), pages, list(map(self.slot_bytes, pages)))
        if declared.experts_on_host and self.machine.weights_on_host and not self.machine.unified:
            both = [page.id for page in pages if page.expert >= 0 and declared.resident_experts_on_host]
            self.weights.leave_at_home(host, pages, both)
        if self.machine.unified:
            self.weights.count_load_buffers(host, self.layout.globals_bytes)

    def _memory_for(self, verb: str, pages: Sequence[Page], role: Role) -> Memory:
        """Return a role's memory for these pages; with stages, the memory of the pages' stage. Errors name `verb`."""
        role = role_named(verb, role, self.machine)
        stages = {stage_of(self.stages, page.layer) for page in pages} if role == "accelerator" else {0}
        if len(stages) > 1:
            raise PolicyError(
                f"{verb}: pages of stages {sorted(stages)} together: keep and pool each stage's by itself"
            )
        return self.memory(role, next(iter(stages), 0))


def stage_of(stages: Sequence[range], layer: int) -> int:
    """Return the number of the pipeline stage that a layer belongs to, given the layers of each stage."""
    return layer * len(stages) // stages[-1].stop


def _placed(
    roles: tuple[Role | None, ...], role: Role, number: int, layers: Collection[int] | None
) -> tuple[Role | None, ...]:
    """Return the memories of a micro-batch's KV cache by layer, after placing some layers in the memory `role`.

    Args:
        roles: by layer, the memory that holds the cache so far; None for none.
        number: the micro-batch's number, for the message.
        layers: numbers of the layers; None for all.

    Returns:
        by layer, the memory that holds the cache afterwards.

    Raises:
        PolicyError: the cache of one of the layers has a place already.
    """
    placed = []
    for layer, before in enumerate(roles):
        here = layers is None or layer in layers
        if here and before is not None:
            raise PolicyError(
                f"place_kv: the KV cache of mb{number} is the {before}'s already: place each once"
            )
        placed.append(role if here else before)
    return tuple(placed)
