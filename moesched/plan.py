"""The plan of a run: what a policy decides before the first step, and the bytes that it costs.

A policy gets a Plan with everything about the model, the machine and the batch, and fills it in: where the KV cache
lives, which pages stay in fast memory, which pools of slots the others stream through, how lanes issue tasks.
Every reservation is checked against the memory's budget at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from moesched.errors import BadInput, PolicyError
from moesched.machines import Machine
from moesched.memory import Fixed, Memory, Pool, Replacement
from moesched.models.layout import Page, WeightLayout
from moesched.models.operations import Operations
from moesched.tasks import Discipline

Role = Literal["accelerator", "host", "pinned"]

KV_BLOCK_TOKENS = 16


class Batch(msgspec.Struct, frozen=True):
    """The requests that run together.

    Attributes:
        prompts: prompt length in tokens, by request.
        new_tokens: tokens to generate for each request.
        micro_batches: the requests of each micro-batch, by index.
        first_request: how many requests of the run came in the batches before.
    """

    prompts: tuple[int, ...]
    new_tokens: int
    micro_batches: tuple[tuple[int, ...], ...]
    first_request: int = 0

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache must hold at the end, whole blocks of it."""
        return self.tokens_at_end(range(len(self.prompts)))

    def tokens_at_end(self, requests: Iterable[int]) -> int:
        """What these requests have in the KV cache at the end, in whole blocks."""
        return sum(cached_tokens(self.prompts[request] + self.new_tokens) for request in requests)

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch, which is its prefill."""
        return max(sum(self.prompts[request] for request in requests) for requests in self.micro_batches)


def cached_tokens(length: int) -> int:
    """What a request of so many tokens takes of the KV cache, in whole blocks."""
    return -(-length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def split_batch(
    prompts: Sequence[int], new_tokens: int, micro_batch_size: int, first_request: int = 0
) -> Batch:
    """Requests in their order, cut into micro-batches of `micro_batch_size` requests (the last may hold fewer)."""
    size = min(micro_batch_size, len(prompts))
    starts = range(0, len(prompts), size)
    parts = tuple(tuple(range(start, min(start + size, len(prompts)))) for start in starts)
    return Batch(tuple(prompts), new_tokens, parts, first_request)


class Plan:
    """What a policy's `plan` fills in.

    Args:
        machine: gives the roles and, where `budgets` is silent, the capacities.
        layout: the model's weights, cut into pages.
        batch: the requests.
        budgets: bytes by memory name.
        slot_bytes: the bytes that a page takes in a slot of the device at hand.
    """

    def __init__(
        self,
        machine: Machine,
        layout: WeightLayout,
        batch: Batch,
        budgets: Mapping[str, int] | None = None,
        slot_bytes: Callable[[Page], int] | None = None,
    ) -> None:
        self.machine = machine
        self.layout = layout
        self.batch = batch
        self.operations = Operations(layout.config, layout.dtype)
        self.memories = _memories(machine, budgets or {})
        self.slot_bytes = slot_bytes or (lambda page: page.nbytes)
        self.pools: list[Pool] = []
        self.kept: list[Fixed] = []
        self.kv_role: Role | None = None
        self.kv_slots = 0
        self.kv_slot_bytes = 0
        self.discipline: Discipline = "ready_first"
        if machine.roles.weights == machine.host.memory:
            self.memory("host").reserve("all weights", sum(map(self.slot_bytes, layout.pages)))
        fast = self.memory("accelerator")
        fast.reserve("embedding, final norm and LM head", layout.globals_bytes)
        fast.reserve("activations of the largest micro-batch", activation_bytes(self.operations, batch))

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
    def ranks(self) -> int:
        """Over how many equal accelerators the model is cut; the plan is that of one of them, like all others'."""
        return self.layout.config.ranks

    @property
    def has_pinned(self) -> bool:
        """Whether pages pass through pinned memory on their way to the accelerator."""
        return self.machine.roles.pinned is not None

    def memory(self, role: Role) -> Memory:
        """The memory that plays a role."""
        roles = self.machine.roles
        if role == "pinned":
            if roles.pinned is None:
                raise BadInput(f"machine {self.machine.name} has no pinned memory: ask `has_pinned` first")
            return self.memories[roles.pinned]
        processor = roles.accelerator if role == "accelerator" else roles.host
        return self.memories[self.machine.processors[processor].memory]

    def in_all(self, memory: Memory, nbytes: int) -> int:
        """What this rank's bytes of a memory come to: with those of all ranks where they share the memory."""
        return nbytes if memory is self.memory("accelerator") else nbytes * self.ranks

    def free(self, role: Role) -> int:
        """Bytes of a memory that are still to be given away."""
        return self.memory(role).free_bytes

    # -- what a policy decides ---------------------------------------------------------------------

    def place_kv(self, role: Role) -> None:
        """Say which memory holds the KV cache."""
        nbytes = self.batch.cache_tokens * self.layout.config.layers * self.operations.kv_bytes
        self.memory(role).reserve(f"KV cache of {self.batch.cache_tokens} tokens", nbytes)
        self.kv_role = role

    def stage_kv(self, slots: int) -> None:
        """Room beside the accelerator for what `Step.load_kv` brings from the host's KV cache.

        slots: how many micro-batches' keys and values of one layer may be there at once.
        """
        self.kv_slots = slots
        if self.machine.unified:
            return
        longest = max(map(self.batch.tokens_at_end, self.batch.micro_batches))
        self.kv_slot_bytes = longest * self.operations.kv_bytes
        self.memory("accelerator").reserve(f"{slots} slots for keys and values", slots * self.kv_slot_bytes)

    def pool(
        self, role: Role, name: str, slots: int, pages: Sequence[Page], replacement: Replacement = "ring"
    ) -> Pool:
        """`slots` slots, each large enough for any of `pages`."""
        size = max((self.slot_bytes(page) for page in pages), default=0)
        pool = Pool(name, self.memory(role), slots, size, replacement)
        self.pools.append(pool)
        return pool

    def keep(self, pages: Sequence[Page], role: Role = "accelerator") -> Fixed:
        """Pages that stay in a memory for the whole run; they are loaded before the first step."""
        pages = tuple(pages)
        kept = Fixed(
            f"kept {len(self.kept)}", self.memory(role), pages, [self.slot_bytes(page) for page in pages]
        )
        self.kept.append(kept)
        return kept

    def check(self) -> None:
        """Whether the plan can run.

        Raises:
            PolicyError: the policy forgot to place the KV cache.
        """
        if self.kv_role is None:
            raise PolicyError(
                "the policy's plan says nothing of the KV cache: call plan.place_kv('accelerator' or 'host')"
            )


def activation_bytes(operations: Operations, batch: Batch) -> int:
    """Bytes of all micro-batches' buffers, and of the workspace of the largest one's kernels."""
    config = operations.config
    lengths = [sum(batch.prompts[request] for request in requests) for requests in batch.micro_batches]
    buffers = operations.hidden_bytes + operations.qkv_bytes + operations.attention_bytes
    expert = config.top_k * (2 * operations.hidden_bytes + 3 * config.intermediate * operations.element)
    sequences = max(len(requests) for requests in batch.micro_batches)
    return sum(lengths) * buffers + max(lengths) * expert + sequences * config.vocabulary * 4


def _memories(machine: Machine, budgets: Mapping[str, int]) -> dict[str, Memory]:
    for name in budgets:
        if name not in machine.memories:
            raise BadInput(
                f"--budget names {name!r}, which machine {machine.name} has not: "
                f"its memories are {', '.join(machine.memories)}"
            )
    return {name: Memory(name, budgets.get(name, tier.nbytes)) for name, tier in machine.memories.items()}
