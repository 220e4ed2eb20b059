"""Computes the bytes of each memory that a plan uses: from model, machine, batch and the plan's declarations alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from moesched.machines import Machine
from moesched.machines.group import numbered
from moesched.models.host_buffers import NUMBER_RING_BYTES, RING_SLOTS, ring_slot_bytes
from moesched.models.layout import Page, WeightLayout
from moesched.models.operations import Operations
from moesched.requests.batch import Batch
from moesched.requests.chunks import Chunk
from moesched.steps.batch_bytes import BatchBytes
from moesched.steps.claims import Parts
from moesched.steps.process import Process
from moesched.steps.read_only import ReadOnly
from moesched.steps.roles import KV_ROLES, Role
from moesched.tasks import Discipline

Content = Literal["weights", "KV cache", "buffers"]
"""Kinds of contents of a reservation; everything but weights and KV cache counts as buffers."""


FROM_A_DISK = (
    "; they can come from a disk: name it as roles.weights, as `moesched machine --weights disk` does"
)
"""Remedy where weights do not fit into the host's memory."""


class Reservation(NamedTuple):
    """Bytes taken of one memory for the whole run.

    Attributes:
        memory: the memory's name.
        what: the user of the bytes in words, the subject of the message "... needs N bytes".
        nbytes: the bytes taken.
        content: the kind of contents: weights, KV cache or buffers.
        parts: the equal parts that the bytes consist of; None if they have none.
        remedy: advice for users, added at the end of that message; empty for none.
    """

    memory: str
    what: str
    nbytes: int
    content: Content = "buffers"
    parts: Parts | None = None
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """One node's part of a model whose experts several nodes share.

    Attributes:
        count: number of nodes.
        index: this node's number, from 0.
        placement: the experts that each node holds, the same in all layers; empty without expert parallelism.
        centralised: whether only the first node has attention, router and sampling.
    """

    count: int = 1
    index: int = 0
    placement: tuple[frozenset[int], ...] = ()
    centralised: bool = False

    @property
    def attends(self) -> bool:
        """True if this node has attention, router and sampling."""
        return self.index == 0 or not self.centralised

    def pages(self, layout: WeightLayout) -> tuple[Page, ...]:
        """Return the pages of this node's experts, and dense pages if it attends; without a placement, all pages."""
        if not self.placement:
            return layout.pages
        held = self.placement[self.index]
        return tuple(
            page for page in layout.pages if (page.expert in held if page.expert >= 0 else self.attends)
        )


@dataclass(frozen=True, slots=True)
class Declared:
    """Declarations of a policy so far, besides pools and resident pages.

    The object is frozen: ask a plan about other declarations with `plan.free(role, given=replace(plan.declared, ...))`.

    Attributes:
        in_flight: the largest number of micro-batches that are within a layer at once in prefill.
        kv_roles: by micro-batch, then by layer, the memory that holds the KV cache; None where none is declared yet.
        kv_buffers: number of buffers on each accelerator into which keys and values are loaded from the host, each for
            one micro-batch and layer.
        experts_on_host: whether the host runs experts too.
        resident_experts_on_host: whether the host also runs experts that stay in an accelerator's memory.
        nodes: this node's part, where several nodes share the experts.
        discipline: "ready_first" lanes start whichever task is ready, "in_order" ones in the order of submission.
        task_limit: the largest number of tasks of a step; None for the default.
        scores: whether `route` and `preview_route` give router scores.
        times: whether steps answer questions about time.
        settled: whether the memory is reserved, so that nothing more can be declared.
    """

    in_flight: int
    kv_roles: tuple[tuple[Role | None, ...], ...]
    kv_buffers: int = 0
    experts_on_host: bool = False
    resident_experts_on_host: bool = False
    nodes: NodeShare = NodeShare()
    discipline: Discipline = "ready_first"
    task_limit: int | None = None
    scores: bool = False
    times: bool = False
    settled: bool = False


class KVPlan(NamedTuple):
    """Placement of the KV cache.

    Attributes:
        roles: by micro-batch, then by layer, the memory that holds the cache; None where none is declared.
        slots: number of buffers on each accelerator, each for one layer's keys and values of one micro-batch, whose
            cache is on the host.
        slot_bytes: bytes of each buffer; 0 where accelerator and host share a memory.
    """

    roles: tuple[tuple[Role | None, ...], ...]
    slots: int
    slot_bytes: int

    def held_by(self, role: Role) -> list[int]:
        """Return the numbers of the micro-batches whose KV cache is in the memory `role`, in all layers or in some."""
        return [number for number, holders in enumerate(self.roles) if role in holders]

    def layers_held_by(self, role: Role, micro_batch: int) -> tuple[int, ...]:
        """Return the numbers of the layers in which a micro-batch's KV cache is in the memory `role`."""
        return tuple(layer for layer, holder in enumerate(self.roles[micro_batch]) if holder == role)

    @property
    def on_gpu(self) -> float:
        """Share (0 to 1) of the pairs (micro-batch, layer) with KV cache on the accelerator: r_c of MoE-Lightning."""
        held = sum(holders.count("accelerator") for holders in self.roles)
        return held / (len(self.roles) * len(self.roles[0]))


class Reservations(ReadOnly):
    """Computes the reservations that a plan's declarations need, in bytes of each memory.

    Args:
        machine: the machine, with one accelerator listed for each stage.
        chunks: the micro-batches of prefill, by number.
        operations: gives the bytes of the model's data, such as those of a layer's keys and values.
        stages: the layers of each stage of a pipeline; a single stage without a pipeline.
        slot_bytes: returns the bytes that a page takes in a slot of the device.
        process: the process that will run the plan; None where that is not known.
    """

    def __init__(
        self,
        machine: Machine,
        layout: WeightLayout,
        batch: Batch,
        chunks: Mapping[int, Chunk],
        operations: Operations,
        stages: Sequence[range],
        slot_bytes: Callable[[Page], int],
        *,
        process: Process | None = None,
    ) -> None:
        self.process = process
        self._machine = machine
        self._layout = layout
        self._batch = batch
        self._stages = stages
        self._slot_bytes = slot_bytes
        self._of_nodes: dict[NodeShare, int] = {}
        self._tokens: dict[tuple[int, ...], int] = {}
        self._cached: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._operations = operations
        self._chunks = chunks
        self.sizes = BatchBytes(batch, self._chunks, self._operations, on_gpu=not machine.unified)
        fast, self._host = machine.accelerator.memory, machine.host.memory
        self._locked = machine.roles.pinned or self._host
        self._accelerators = [numbered(fast, stage) for stage in range(len(stages))]
        self._seal()

    def of(self, declared: Declared) -> list[Reservation]:
        """Return all reservations for these declarations, in the order in which they are made."""
        return [
            *self.needed_by_all(declared.nodes),
            *self._within_layers(declared),
            *self._kv_cache(declared),
            *self._kv_buffers(declared),
            *self._replayed(declared),
            *self._host_experts(declared),
            *self._host_buffers(declared),
            *self._node_weights(declared.nodes),
        ]

    def needed_by_all(self, nodes: NodeShare) -> Iterator[Reservation]:
        """Yield the reservations that every policy needs, except those for activations within a layer."""
        if nodes.count == 1:
            yield from self._all_weights(nodes)
        sizes = self.sizes
        for fast, nbytes in zip(
            self._accelerators, global_bytes(self._layout, len(self._stages)), strict=True
        ):
            yield Reservation(fast, "embedding, final norm and LM head", nbytes * nodes.attends, "weights")
            yield Reservation(fast, "hidden states of all micro-batches", sizes.staying)
            yield Reservation(fast, "workspace of the largest micro-batch's kernels", sizes.workspace)
            if sizes.unpacked and not self._machine.unified:
                yield Reservation(fast, "unpacked rows of coded weights", sizes.unpacked)

    def kv(self, declared: Declared) -> KVPlan:
        """Return the placement of the KV cache, and the buffers for keys and values that are loaded to accelerators."""
        loaded = [number for number, roles in enumerate(declared.kv_roles) if set(roles) != {"accelerator"}]
        slots = declared.kv_buffers if loaded else 0
        if not slots or self._machine.unified:
            return KVPlan(declared.kv_roles, slots, 0)
        return KVPlan(declared.kv_roles, slots, max(self._layer_caches[number] for number in loaded))

    @cached_property
    def _layer_caches(self) -> tuple[int, ...]:
        """Bytes of each micro-batch's KV cache at the end of the generation, in the layer where it is largest."""
        batch, kinds = self._batch, self._operations.kinds.values()
        longest = map(batch.unshared_at_end, batch.micro_batches)
        return tuple(max(kind.held_bytes(each, batch.beams) for kind in kinds) for each in longest)

    def cache_bytes(self, micro_batches: Iterable[int], layers: Iterable[int]) -> int:
        """Return the bytes of the KV caches of micro-batches in these layers at the end of the generation.

        Results are kept for later calls.
        """
        key = tuple(micro_batches), tuple(layers)
        if key not in self._cached:
            batch, (numbers, of_layers) = self._batch, key
            requests = [request for number in numbers for request in batch.micro_batches[number]]
            self._cached[key] = self._operations.held_in(of_layers, batch.each_at_end(requests), batch.beams)
        return self._cached[key]

    def _tokens_of(self, micro_batches: Iterable[int]) -> int:
        """Return the number of tokens in the KV caches of micro-batches at the end of the generation.

        Results are kept for later calls.
        """
        key = tuple(micro_batches)
        if key not in self._tokens:
            batch = self._batch
            self._tokens[key] = sum(batch.tokens_at_end(batch.micro_batches[number]) for number in key)
        return self._tokens[key]

    def _all_weights(self, nodes: NodeShare) -> Iterator[Reservation]:
        """Yield the reservation of all weights that this node uses, if they come from the host's memory."""
        if self._machine.weights_on_host:
            nbytes = self._weight_bytes(nodes)
            yield Reservation(self._host, "all weights", nbytes, "weights", remedy=FROM_A_DISK)

    def _weight_bytes(self, nodes: NodeShare) -> int:
        """Return the bytes that all pages of this node take in slots of the device; kept for later calls."""
        if nodes not in self._of_nodes:
            self._of_nodes[nodes] = sum(map(self._slot_bytes, nodes.pages(self._layout)))
        return self._of_nodes[nodes]

    def _within_layers(self, declared: Declared) -> Iterator[Reservation]:
        """Yield reservations for data that is needed only within a layer.

        In prefill, activations count for the micro-batches in flight; in decode, for all micro-batches. With several
        nodes, buffers for the sums that the nodes exchange are reserved as well.
        """
        sizes, count, nodes = self.sizes, declared.in_flight, declared.nodes
        for fast in self._accelerators:
            what = f"activations of {count} micro-batches within a layer"
            yield Reservation(fast, what, sizes.in_prefill(count), parts=Parts(count, "micro-batches"))
            if count < len(self._chunks) or self._batch.chunked:
                yield Reservation(fast, "activations of all micro-batches in decode", sizes.in_decode)
        if nodes.count > 1:
            for memory in dict.fromkeys((*self._accelerators, self._host)):
                yield Reservation(memory, "sums exchanged between nodes", sizes.exchanged(count))

    def _kv_cache(self, declared: Declared) -> Iterator[Reservation]:
        """Yield reservations for KV caches.

        For prompts in chunks whose cache is on the host, accelerators also reserve one layer's keys and values.
        """
        for role in KV_ROLES:
            groups = held_alike(declared.kv_roles, role)
            chosen = [number for numbers in groups.values() for number in numbers]
            if not chosen:
                continue
            tokens = self._tokens_of(chosen) * declared.nodes.attends
            here = role == "accelerator"
            memories = self._accelerators if here else [self._host]
            layers = self._stages if here else [range(self._layout.config.layers)]
            for memory, range_of_layers in zip(memories, layers, strict=True):
                nbytes = sum(
                    self.cache_bytes(numbers, [layer for layer in range_of_layers if layer in held])
                    for held, numbers in groups.items()
                )
                nbytes *= declared.nodes.attends
                what, parts = f"KV cache of {tokens:,} tokens", Parts(tokens, "tokens")
                yield Reservation(memory, what, nbytes, "KV cache", parts)
            prompts = 0 if here or self._machine.unified else self.sizes.device_kv(chosen)
            if prompts:
                for fast in self._accelerators:
                    yield Reservation(fast, "keys and values of a layer of prompts in chunks", prompts)

    def _kv_buffers(self, declared: Declared) -> Iterator[Reservation]:
        kv = self.kv(declared)
        if kv.slot_bytes:
            for fast in self._accelerators:
                what, parts = f"{kv.slots} slots for keys and values", Parts(kv.slots, "slots")
                yield Reservation(fast, what, kv.slots * kv.slot_bytes, parts=parts)

    def _replayed(self, declared: Declared) -> Iterator[Reservation]:
        if self._machine.accelerator.replays:
            nbytes = self.sizes.replayed(loads=self.kv(declared).slots > 0)
            for fast in self._accelerators:
                yield Reservation(fast, "results of kernels that are replayed", nbytes)
                yield Reservation(fast, "graphs of kernels", self.sizes.graphs)

    def _host_experts(self, declared: Declared) -> Iterator[Reservation]:
        """Yield reservations for experts on the host: their rows, their workspace, and accelerators' hidden states."""
        if not declared.experts_on_host or self._machine.unified:
            return
        prompts = self.sizes.host_prompt_rows(declared.in_flight)
        yield Reservation(self._locked, "rows of prompts for experts on the host", prompts)
        yield Reservation(self._host, "workspace of experts on the host", self.sizes.host_workspace)
        for fast in self._accelerators:
            yield Reservation(fast, "hidden states on their way to the host", self.sizes.hidden)

    def _host_buffers(self, declared: Declared) -> Iterator[Reservation]:
        """Yield the reservations for page-locked buffers through which the host exchanges data with accelerators."""
        if self._machine.unified:
            return
        sizes, locked = self.sizes, self._locked
        attends = declared.nodes.attends
        attended = [each for each, roles in enumerate(declared.kv_roles) if "host" in roles and attends]
        rows = sizes.host_rows(attended, routed=declared.experts_on_host)
        yield Reservation(locked, "rows exchanged with the accelerator", rows)
        if attended:
            yield Reservation(locked, "new keys and values on their way to the host", sizes.kv_pieces)
        numbers = NUMBER_RING_BYTES * len(self._accelerators)
        yield Reservation(locked, "numbers on their way to the accelerator", numbers)
        if not (self._machine.page_locked and self._machine.weights_on_host):
            ring = RING_SLOTS * ring_slot_bytes(self._largest_page)
            yield Reservation(locked, "ring that weights pass through", ring)

    @cached_property
    def _largest_page(self) -> int:
        """Bytes that the largest page takes in a slot."""
        return max(map(self._slot_bytes, self._layout.pages))

    def _node_weights(self, nodes: NodeShare) -> Iterator[Reservation]:
        """Yield the reservations for the weights that this node holds, if the policy places experts on nodes."""
        if not nodes.placement:
            return
        if nodes.count > 1:
            yield from self._all_weights(nodes)
        beside = ", with what every token uses," if nodes.attends else ""
        what = f"a share of {len(nodes.placement[nodes.index])} experts of each layer{beside}"
        nbytes = self._weight_bytes(nodes)
        yield Reservation(self._accelerators[0], what, nbytes, "weights")


def held_alike(kv_roles: Sequence[Sequence[Role | None]], role: Role) -> dict[tuple[int, ...], list[int]]:
    """Group the micro-batches whose KV cache is at least partly in the memory `role`, by their layers there.

    kv_roles: by micro-batch, then by layer, the memory that holds the cache.

    Returns:
        for each tuple of layers, the numbers of the micro-batches whose cache the memory holds in exactly these layers.
    """
    of_roles: dict[Sequence[Role | None], list[int]] = {}
    for number, roles in enumerate(kv_roles):
        of_roles.setdefault(roles, []).append(number)
    return {
        tuple(layer for layer, holder in enumerate(roles) if holder == role): numbers
        for roles, numbers in of_roles.items()
        if role in roles
    }


def global_bytes(layout: WeightLayout, stages: int) -> list[int]:
    """Return, for each pipeline stage, the bytes of its weights outside the layers.

    The first stage has the embedding, the last one the final norm and the LM head.
    """
    if stages == 1:
        return [layout.globals_bytes]
    config = layout.config
    shape = config.vocabulary, config.hidden
    embedding = round(math.prod(shape) * config.tensor_bytes("embedding", shape, layout.dtype))
    head = layout.globals_bytes - (0 if config.tied_embeddings else embedding)
    return [embedding, *[0] * (stages - 2), head]
