"""The plan of a run: what a policy decides before the first step, and the bytes that it costs.

A policy gets a Plan with everything about the model, the machine and the batch, and fills it in: where the KV cache
lives, which pages stay in fast memory, which pools of slots the others stream through, how lanes issue tasks.
Every reservation is checked against the memory's budget at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from moesched.errors import BadInput, OverBudget, PolicyError
from moesched.machines import Machine
from moesched.machines.group import numbered, written_out
from moesched.models.config import ITEM_BYTES
from moesched.models.layout import Page, WeightLayout
from moesched.models.operations import Operations
from moesched.requests.batch import Batch
from moesched.steps.batch_bytes import BatchBytes
from moesched.steps.memory import Fixed, Home, Memory, Pool, Replacement
from moesched.steps.node_experts import require_placement
from moesched.tasks import Discipline

Role = Literal["accelerator", "host", "pinned"]

KV_ROLES: tuple[Role, ...] = ("accelerator", "host")
"""The memories that may hold a KV cache."""

ALLOCATOR_BYTES = 32_000_000
ALLOCATOR_WORKSPACES = 1.5
"""What the C library keeps of memory that kernels gave back, in bytes and in workspaces: each thread has a store of its
own. It was measured with glibc; having large pieces given back at once made kernels two to three times slower."""
LOAD_BUFFERS = 4
"""How many pages are on their way at most while those that stay are loaded; fewer where memory is short."""


class Plan:
    """What a policy's `plan` fills in.

    Args:
        machine: gives the roles and, where `budgets` is silent, the capacities.
        layout: the model's weights, cut into pages.
        batch: the requests.
        budgets: bytes by memory name.
        slot_bytes: the bytes that a page takes in a slot of the device at hand.
        nodes, node: how many machines share the model's experts, and which of them this one is, from 0.
    """

    def __init__(
        self,
        machine: Machine,
        layout: WeightLayout,
        batch: Batch,
        budgets: Mapping[str, int] | None = None,
        slot_bytes: Callable[[Page], int] | None = None,
        nodes: int = 1,
        node: int = 0,
    ) -> None:
        self.machine = machine
        self.layout = layout
        self.batch = batch
        self.nodes = nodes
        self.node = node
        self.placement: tuple[frozenset[int], ...] = ()
        self.centralised = False
        self.chunks = batch.chunks()
        self.operations = Operations(layout.config, layout.dtype)
        self.stages: tuple[range, ...] = (self.layers,)
        self.memories = _memories(machine, budgets or {})
        self.slot_bytes = slot_bytes or (lambda page: page.nbytes)
        self.pools: list[Pool] = []
        self.resident: list[Fixed] = []
        self.filled: list[tuple[Pool, tuple[Page, ...]]] = []
        self.kv_roles: list[Role | None] = [None for _ in self.micro_batches]
        self.kv_slots = 0
        self.kv_slot_bytes = 0
        self.discipline: Discipline = "ready_first"
        self.in_flight: int | None = None
        self.experts_on_host = False
        self.resident_experts_on_host = False
        self.home: Home | None = None
        self.staged = LOAD_BUFFERS
        self._takes = BatchBytes(batch, self.chunks, self.operations)
        self._layers_reserved = False
        self._needed = self._reserve_what_all_need()

    # -- what a policy reads -----------------------------------------------------------------------

    @property
    def layers(self) -> range:
        """The model's layers."""
        return range(self.layout.config.layers)

    @property
    def micro_batches(self) -> range:
        """The micro-batches of the batch."""
        return range(len(self.batch.micro_batches))

    @property
    def chunked(self) -> bool:
        """Whether a prompt is cut into several micro-batches of prefill."""
        return len(self.chunks) > len(self.micro_batches)

    @property
    def ranks(self) -> int:
        """Over how many equal accelerators the model is cut; the plan is that of one of them, like all others'."""
        return self.layout.config.ranks

    @property
    def attends(self) -> bool:
        """Whether this node has attention, router and sampling; in a centralised plan only the first one has."""
        return self.node == 0 or not self.centralised

    @property
    def pages(self) -> tuple[Page, ...]:
        """The pages that this node has a use for: without expert parallelism, all of them."""
        if not self.placement:
            return self.layout.pages
        held = self.placement[self.node]
        return tuple(
            page for page in self.layout.pages if (page.expert in held if page.expert >= 0 else self.attends)
        )

    @property
    def has_pinned(self) -> bool:
        """Whether pages pass through pinned memory on their way to the accelerator."""
        return self.machine.roles.pinned is not None

    @property
    def weights_on_host(self) -> bool:
        """Whether the weights come from the memory that the host computes from."""
        return self.machine.roles.weights == self.machine.host.memory

    @property
    def contended(self) -> bool:
        """Whether what a lane does slows others: accelerator and host share a memory, or several stages' links do."""
        return self.machine.unified or len(self.stages) > 1

    @property
    def accelerators(self) -> list[Memory]:
        """The accelerators' memories, by stage."""
        return [self.memory("accelerator", stage) for stage in range(len(self.stages))]

    def stage_of(self, layer: int) -> int:
        """The number of the stage that a layer belongs to."""
        return layer * len(self.stages) // len(self.layers)

    def memory(self, role: Role, stage: int = 0) -> Memory:
        """The memory that plays a role; each stage of a pipeline has an accelerator of its own."""
        roles = self.machine.roles
        if role == "pinned":
            if roles.pinned is None:
                raise BadInput(f"machine {self.machine.name} has no pinned memory: ask `has_pinned` first")
            return self.memories[roles.pinned]
        processor = numbered(roles.accelerator, stage) if role == "accelerator" else roles.host
        return self.memories[self.machine.processors[processor].memory]

    def in_all(self, memory: Memory, nbytes: int) -> int:
        """What this rank's bytes of a memory come to: with those of all ranks where they share the memory."""
        return nbytes if memory in self.accelerators else nbytes * self.ranks

    @property
    def process_bytes(self) -> int:
        """What a process takes at its peak, beyond what it took before, if all memories are the host's."""
        kept_back = ALLOCATOR_BYTES + round(ALLOCATOR_WORKSPACES * self._takes.workspace)
        return self.ranks * (sum(memory.peak for memory in self.memories.values()) + kept_back)

    def free(self, role: Role, stage: int = 0) -> int:
        """Bytes of a memory that are still to be given away."""
        return self.memory(role, stage).free_bytes

    # -- what a policy decides ---------------------------------------------------------------------

    def pipeline(self) -> None:
        """Cut the layers into stages, one for each of the machine's equal accelerators: pipeline parallelism.

        Layer i of L belongs to stage i S // L of S. Pages go to the accelerator of their layer's stage, and a
        micro-batch's hidden state moves on with the first verb of a stage. With one accelerator there is one stage.

        Raises:
            PolicyError: something was placed already.
        """
        self._require_untouched("pipeline")
        layers = len(self.layers)
        count = min(self.machine.accelerator_group.count, layers)
        starts = [-(-stage * layers // count) for stage in range(count + 1)]
        self.stages = tuple(map(range, starts, starts[1:]))
        self.machine = written_out(self.machine, count)
        budgets = {memory.name: memory.capacity for memory in self.memories.values()}
        fast = self.memory("accelerator")
        for name in set(self.machine.memories) - set(budgets):
            budgets[name] = fast.capacity
        self.memories = _memories(self.machine, budgets)
        self._needed = self._reserve_what_all_need()

    def centralise(self) -> None:
        """Have attention, router and sampling on the first node only; by default every node does all of them alike.

        The other nodes get each layer's routed rows from the first one, which adds up what they make of them
        (section 3.2 of the paper on a cluster of Apple silicon, RACS'24). Say it before `place_experts`.

        Raises:
            PolicyError: something was placed already.
        """
        self._require_untouched("centralise")
        if self.batch.beams > 1:
            raise BadInput(
                "beam search needs every node to attend: use --set decentralised=true, or --beams 1"
            )
        self.centralised = True
        self._start_anew()

    def place_experts(self, placement: Sequence[Collection[int]]) -> None:
        """Say which experts each node holds, in all layers; after `centralise`, if that is said.

        This node's stay in its accelerator's memory, with the pages that every token needs where it attends.

        Raises:
            PolicyError: the placement is that of other nodes or experts, or nobody holds an expert; experts were placed
                already.
            OverBudget: they do not fit.
        """
        if self.placement:
            raise PolicyError("place_experts: experts were placed already: place them once")
        require_placement(placement, self.nodes, self.layout.config.experts)
        self.placement = tuple(map(frozenset, placement))
        if self.nodes > 1:
            self._reserve_home()
        fast = self.memory("accelerator")
        nbytes = sum(map(self.slot_bytes, self.pages))
        if nbytes > fast.free_bytes:
            beside = " beside what every token needs" if self.attends else ""
            raise OverBudget(
                f"{len(self.placement[self.node])} experts of each layer{beside} need {nbytes:,} bytes of {fast.name}, "
                f"which has {max(fast.free_bytes, 0):,} free of its budget of {fast.capacity:,}: "
                f"{nbytes - fast.free_bytes:,} bytes too few"
            )
        self.keep(self.pages)

    def limit_in_flight(self, micro_batches: int) -> None:
        """Promise that in prefill no more micro-batches are within a layer at once; otherwise all of them may be.

        A micro-batch is within a layer from its `pre_attention` to the last of `post_attention` or `combine` and
        `offload_kv`. The fewer, the less memory they need. Say it before `place_kv`.

        Raises:
            PolicyError: the KV cache was placed already.
        """
        if self._layers_reserved:
            raise PolicyError("limit_in_flight: the memory is given away already: call it before place_kv")
        self.in_flight = max(1, micro_batches)

    def place_kv(self, role: Role, micro_batches: Iterable[int] | None = None) -> None:
        """Say which memory holds the KV cache of these micro-batches, or of all.

        Where it is the accelerators', each holds that of its layers. A micro-batch's cache is never divided.

        Raises:
            PolicyError: one of them has its cache somewhere already.
        """
        chosen = tuple(self.micro_batches if micro_batches is None else micro_batches)
        for number in chosen:
            if self.kv_roles[number] is not None:
                raise PolicyError(
                    f"place_kv: the KV cache of mb{number} is the {self.kv_roles[number]}'s already: place each once"
                )
        if not chosen:
            return
        self._reserve_layers()
        tokens = sum(self.batch.tokens_at_end(self.batch.micro_batches[number]) for number in chosen)
        tokens *= self.attends
        for stage, layers in enumerate(self.stages if role == "accelerator" else (self.layers,)):
            nbytes = tokens * len(layers) * self.operations.kv_bytes
            self.memory(role, stage).reserve(f"KV cache of {tokens} tokens", nbytes)
        if role != "accelerator" and not self.machine.unified:
            self._reserve_device_kv(chosen)
        for number in chosen:
            self.kv_roles[number] = role

    def kv_that_fits(self, beside: int) -> list[int]:
        """The first micro-batches whose KV caches fit the accelerators' memories beside so many bytes.

        Say it after `limit_in_flight`, and before `place_kv`.
        """
        self._reserve_layers()
        left = min(self.free("accelerator", stage) for stage in range(len(self.stages)))
        left -= beside + self._takes.device_kv(self.micro_batches)
        layers = max(map(len, self.stages))
        fitting = []
        for number, requests in enumerate(self.batch.micro_batches):
            left += self._takes.device_kv([number])
            left -= self.batch.tokens_at_end(requests) * layers * self.operations.kv_bytes
            if left < 0:
                break
            fitting.append(number)
        return fitting

    def cached_by(self, role: Role) -> list[int]:
        """The micro-batches whose KV cache a memory holds."""
        return [number for number in self.micro_batches if self.kv_roles[number] == role]

    @property
    def kv_on_gpu(self) -> float:
        """The share of the micro-batches whose KV cache the accelerator holds: r_c of MoE-Lightning."""
        return len(self.cached_by("accelerator")) / len(self.micro_batches)

    def reserve_kv_buffers(self, slots: int) -> None:
        """Room beside the accelerator for what `Step.load_kv` brings from the host's KV cache.

        slots: how many micro-batches' keys and values of one layer may be there at once; of each stage. There are none
            where the accelerator holds the cache of all.
        """
        batches = zip(self.batch.micro_batches, self.kv_roles, strict=True)
        loaded = [requests for requests, role in batches if role != "accelerator"]
        self.kv_slots = slots if loaded else 0
        if self.machine.unified or not loaded:
            return
        longest = max(map(self.batch.longest_at_end, loaded))
        self.kv_slot_bytes = longest * self.operations.kv_bytes
        for fast in self.accelerators:
            fast.reserve(f"{slots} slots for keys and values", slots * self.kv_slot_bytes)

    def run_experts_on_host(self) -> None:
        """Have the host run experts as well, from weights in its own memory. Say it after `place_kv`.

        Those weights are all that stay in no accelerator, where weights come from the host's memory, and otherwise
        what `keep` keeps there. Room is made for the rows that go to the host and the outputs that come back.
        """
        self.experts_on_host = True
        if self.machine.unified:
            return
        host = self.memory("host")
        host.reserve("rows of experts on the host", self._takes.host_rows(self.in_flight))
        host.reserve("workspace of experts on the host", self._takes.host_workspace)
        for fast in self.accelerators:
            fast.reserve("hidden states on their way to the host", self._takes.hidden)

    def run_resident_experts_on_host(self) -> None:
        """Have the host run experts that stay in an accelerator, too, where weights come from the host's own memory.

        `resident_experts_on_host` says afterwards whether it can. Say it after `run_experts_on_host`.
        """
        self.resident_experts_on_host = (
            self.experts_on_host and self.weights_on_host and not self.machine.unified
        )

    def pool(
        self, role: Role, name: str, slots: int, pages: Sequence[Page], replacement: Replacement = "ring"
    ) -> Pool:
        """`slots` slots, each large enough for any of `pages`.

        Raises:
            PolicyError: the pages belong to several stages, and the pool would be an accelerator's.
        """
        size = max((self.slot_bytes(page) for page in pages), default=0)
        pool = Pool(name, self._memory_for(pages, role), slots, size, replacement)
        self.pools.append(pool)
        return pool

    def keep(self, pages: Sequence[Page], role: Role = "accelerator") -> Fixed:
        """Pages that stay in a memory for the whole run; they are loaded before the first step.

        Raises:
            PolicyError: they belong to several stages, and the memory would be an accelerator's.
        """
        pages = tuple(pages)
        memory = self._memory_for(pages, role)
        resident = Fixed(
            f"kept {len(self.resident)}", memory, pages, [self.slot_bytes(page) for page in pages]
        )
        self.resident.append(resident)
        return resident

    def fill(self, pool: Pool, pages: Iterable[Page]) -> None:
        """Have pages in a pool before the first step: they are brought there once those that stay are loaded."""
        self.filled.append((pool, tuple(pages)))

    def check(self) -> None:
        """Whether the plan can run.

        Raises:
            PolicyError: the policy forgot to place the KV cache, or a micro-batch's.
        """
        if None in self.kv_roles:
            whose = f" of mb{self.kv_roles.index(None)}" if any(self.kv_roles) else ""
            raise PolicyError(
                f"the policy's plan says nothing of the KV cache{whose}: call plan.place_kv('accelerator' or 'host')"
            )
        if self.experts_on_host and self.weights_on_host and not self.machine.unified and self.home is None:
            resident = {
                page.id for pool in self.resident for page in pool.pages() if not self._at_host_too(page)
            }
            self.home = Home(self.memory("host"), (page for page in self.pages if page.id not in resident))
        self._check_loading()

    # -- helpers -----------------------------------------------------------------------------------

    def _reserve_what_all_need(self) -> dict[str, int]:
        """Reserve what no policy can do without; returns the bytes by memory."""
        layout = self.layout
        if self.nodes == 1:
            self._reserve_home()
        for fast, nbytes in zip(self.accelerators, global_bytes(layout, len(self.stages)), strict=True):
            fast.reserve("embedding, final norm and LM head", nbytes * self.attends)
            fast.reserve("hidden states of all micro-batches", self._takes.staying)
            fast.reserve("workspace of the largest micro-batch's kernels", self._takes.workspace)
        return self._used()

    def _reserve_home(self) -> None:
        """Room for all weights that this node uses, where they come from the memory that the host computes from."""
        if self.weights_on_host:
            self.memory("host").reserve("all weights", sum(map(self.slot_bytes, self.pages)))

    def _reserve_device_kv(self, micro_batches: Iterable[int]) -> None:
        """Room for one layer's keys and values of prompts in chunks whose KV cache is not the accelerator's."""
        nbytes = self._takes.device_kv(micro_batches)
        if nbytes:
            for fast in self.accelerators:
                fast.reserve("keys and values of a layer of prompts in chunks", nbytes)

    def _reserve_layers(self) -> None:
        """What micro-batches have within a layer, once: of prefill those that are in flight, of decode all."""
        if self._layers_reserved:
            return
        self._layers_reserved = True
        takes, count = self._takes, len(self.chunks)
        self.in_flight = count if self.in_flight is None else min(self.in_flight, count)
        for fast in self.accelerators:
            within = takes.in_prefill(self.in_flight)
            fast.reserve(f"activations of {self.in_flight} micro-batches within a layer", within)
            if self.in_flight < count or self.chunked:
                fast.reserve("activations of all micro-batches in decode", takes.in_decode)
        if self.nodes > 1:
            for memory in {id(each): each for each in (*self.accelerators, self.memory("host"))}.values():
                memory.reserve("sums on their way between nodes", takes.exchanged(self.in_flight))

    def _check_loading(self) -> None:
        """Count pages on their way to where they stay: they need memory of their own where no pool has slots yet.

        Raises:
            OverBudget: there is none.
        """
        host = self.memory("host")
        slots = any(pool.memory is host and len(pool.slots) > 1 for pool in self.pools)
        sizes = [
            slot.nbytes for resident in self.resident for slot in resident.slots if resident.memory is host
        ]
        if self.machine.unified and sizes and not slots:
            loaded = sum(sizes) + self.layout.globals_bytes
            self.staged = min(LOAD_BUFFERS, max(1, (host.capacity - loaded) // max(sizes)))
            host.require("weights while they are loaded", loaded + self.staged * max(sizes))

    def _at_host_too(self, page: Page) -> bool:
        return self.resident_experts_on_host and page.expert >= 0

    def _require_untouched(self, verb: str) -> None:
        if self._used() != self._needed:
            raise PolicyError(f"{verb}: memory was reserved already: call it before all else")

    def _start_anew(self) -> None:
        """Forget all reservations but for what every policy needs, which is another by now."""
        budgets = {memory.name: memory.capacity for memory in self.memories.values()}
        self.memories = _memories(self.machine, budgets)
        self._needed = self._reserve_what_all_need()

    def _used(self) -> dict[str, int]:
        return {name: memory.used for name, memory in self.memories.items()}

    def _memory_for(self, pages: Sequence[Page], role: Role) -> Memory:
        """The memory of a role that pages go to: an accelerator's is that of their stage."""
        stages = {self.stage_of(page.layer) for page in pages} if role == "accelerator" else {0}
        if len(stages) > 1:
            raise PolicyError(
                f"pages of stages {sorted(stages)} together: keep and pool each stage's by itself"
            )
        return self.memory(role, next(iter(stages), 0))


def global_bytes(layout: WeightLayout, stages: int) -> list[int]:
    """Bytes of the embedding, the final norm and the LM head at each stage: the first embeds, the last samples."""
    if stages == 1:
        return [layout.globals_bytes]
    config = layout.config
    embedding = config.vocabulary * config.hidden * ITEM_BYTES[layout.dtype]
    head = layout.globals_bytes - (0 if config.tied_embeddings else embedding)
    return [embedding, *[0] * (stages - 2), head]


def _memories(machine: Machine, budgets: Mapping[str, int]) -> dict[str, Memory]:
    for name in budgets:
        if name not in machine.memories:
            raise BadInput(
                f"--budget names {name!r}, which machine {machine.name} has not: "
                f"its memories are {', '.join(machine.memories)}"
            )
    return {name: Memory(name, budgets.get(name, tier.nbytes)) for name, tier in machine.memories.items()}
