"""The KV cache: one arena cut into blocks of tokens, which sequences of any length take and give back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import msgspec
import torch

from moesched.errors import BadInput, OverBudget
from moesched.models.config import ModelConfig

from .copies import indices
from .kernels import KVView

Tensor = torch.Tensor


class OutOfBlocks(OverBudget):
    """The KV cache has fewer free blocks than a sequence needs."""


class _Run(NamedTuple):
    """Sequences of one length whose slots lie at even distances, so that one strided view holds them all."""

    queries: int
    length: int
    sequences: int
    first_slot: int
    distance: int  # slots from one sequence to the next


class _Gather(NamedTuple):
    """Sequences of one length whose blocks are scattered: the slots of their blocks, to be copied together.

    Each begins with a block of its own, as in the cache, for the same bits as from there.
    """

    queries: int
    length: int
    blocks: list[int]
    slots: Tensor | None = None


class KVStep(NamedTuple):
    """The new tokens of some sequences, with their places in the cache: what a step's kernels go by.

    past, new: tokens of each sequence before the step, and in it. positions_T: of the new tokens in their
    sequences. slots_T: of the new tokens in the arena. last_S: each sequence's last token among the T.
    """

    sequences: tuple[int, ...]
    past: tuple[int, ...]
    new: tuple[int, ...]
    positions_T: Tensor
    slots_T: Tensor
    last_S: Tensor
    parts: tuple[_Run | _Gather, ...]


class _Sequence(msgspec.Struct):
    length: int
    blocks: list[int]


class BlockedKV:
    """Keys and values of all layers, (layers, 2, slots, K, d), and which blocks of slots each sequence has.

    A sequence may reserve blocks for its final length when it is opened, which keeps them together and its
    views free of copies, or take them as it grows. Sequences that `reorder` made share full blocks. `append` and
    `views` may run beside all else, for steps that were extended before.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise BadInput(
                f"a KV cache of {blocks} blocks of {block_size} tokens holds nothing; give 1 or more"
            )
        shape = (config.layers, 2, blocks * block_size, config.kv_heads, config.head_dim)
        self.block_size = block_size
        self.slots = torch.empty(shape, dtype=dtype, device=device)
        self._free = _FreeBlocks(blocks)
        self._sequences: dict[int, _Sequence] = {}
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the arena: what `kv_bytes` of the layout said beforehand."""
        return self.slots.nbytes

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence has."""
        return self._free.count

    def length(self, sequence: int) -> int:
        """Tokens of the sequence that have a place in the cache."""
        return self._sequences[sequence].length

    def open(self, sequence: int, tokens: int = 0) -> None:
        """Begin a sequence, and reserve blocks for that many tokens. Raises OutOfBlocks."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already")
        blocks = self._free.take(self._blocks_for(tokens))
        self._sequences[sequence] = _Sequence(0, blocks)

    def close(self, sequence: int) -> None:
        """End a sequence and give its blocks back."""
        self._free.give_back(self._sequences.pop(sequence).blocks)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on; the blocks stay reserved."""
        state = self._sequences[sequence]
        state.length = min(state.length, length)

    def extend(self, sequences: Sequence[int], new: Sequence[int]) -> KVStep:
        """Make room for new[i] tokens at the end of sequences[i], which count from now on.

        Raises OutOfBlocks, and changes nothing, where the blocks run out.
        """
        states = [self._sequences[sequence] for sequence in sequences]
        past = tuple(state.length for state in states)
        with self._lock:
            self._grow(states, [length + tokens for length, tokens in zip(past, new, strict=True)])
        return self._step(tuple(sequences), states, past, tuple(new))

    def reorder(self, sequences: Sequence[int], parents: Sequence[int], heirs: Sequence[int]) -> None:
        """Replace sequences by others that go on with what those have: heirs[i] with that of sequences[parents[i]].

        Full blocks are shared, of a partly filled one every heir but the first gets a copy, before it is written to.

        Raises:
            OutOfBlocks: there are not enough for the copies.
        """
        with self._lock:
            before = [self._sequences.pop(sequence) for sequence in sequences]
            copies: list[tuple[int, _Sequence]] = []
            followed: set[int] = set()
            for heir, parent in zip(heirs, parents, strict=True):
                state = before[parent]
                if parent in followed:
                    full, rest = divmod(state.length, self.block_size)
                    split_off = _Sequence(state.length, state.blocks[:full])
                    self._free.share(split_off.blocks)
                    if rest:
                        copies.append((state.blocks[full], split_off))
                    state = split_off
                followed.add(parent)
                self._sequences[heir] = state
            for number, state in enumerate(before):
                if number not in followed:
                    self._free.give_back(state.blocks)
            self._free.require(len(copies))
            for _, state in copies:
                state.blocks += self._free.take(1, after=state.blocks[-1] if state.blocks else -1)
        self._copy_blocks([(source, state.blocks[-1]) for source, state in copies])

    def append(self, layer: int, step: KVStep, keys_TKd: Tensor, values_TKd: Tensor) -> None:
        """Store the new tokens' keys and values of one layer."""
        self.slots[layer, 0].index_copy_(0, step.slots_T, keys_TKd)
        self.slots[layer, 1].index_copy_(0, step.slots_T, values_TKd)

    def views(self, layer: int, step: KVStep) -> list[KVView]:
        """The cached keys and values of the step's sequences, in the step's order, new tokens included.

        Views of the arena where a sequence's blocks lie together, copies where they do not.
        """
        return [self._view(self.slots[layer], part) for part in step.parts]

    # ------------------------------------------------------------ inside

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            sources, targets = (
                indices(self._slots_of_blocks(blocks), self.slots.device)
                for blocks in zip(*pairs, strict=True)
            )
            self.slots.index_copy_(2, targets, self.slots.index_select(2, sources))

    def _slots_of_blocks(self, blocks: Sequence[int]) -> list[int]:
        size = self.block_size
        return [slot for block in blocks for slot in range(block * size, (block + 1) * size)]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _grow(self, states: list[_Sequence], lengths: list[int]) -> None:
        wanted = [max(0, self._blocks_for(n) - len(s.blocks)) for s, n in zip(states, lengths, strict=True)]
        self._free.require(sum(wanted))
        for state, blocks, length in zip(states, wanted, lengths, strict=True):
            if blocks:
                state.blocks += self._free.take(blocks, after=state.blocks[-1] if state.blocks else -1)
            state.length = length

    def _step(
        self, sequences: tuple[int, ...], states: list[_Sequence], past: tuple[int, ...], new: tuple[int, ...]
    ) -> KVStep:
        device = self.slots.device
        positions = [
            p for before, tokens in zip(past, new, strict=True) for p in range(before, before + tokens)
        ]
        slots = [
            slot
            for state, before in zip(states, past, strict=True)
            for slot in self._slots_of(state, before, state.length)
        ]
        last = [sum(new[: i + 1]) - 1 for i in range(len(new))]
        return KVStep(
            sequences,
            past,
            new,
            indices(positions, device),
            indices(slots, device),
            indices(last, device),
            tuple(self._parts(states, new)),
        )

    def _slots_of(self, state: _Sequence, start: int, stop: int) -> list[int]:
        size = self.block_size
        return [state.blocks[i // size] * size + i % size for i in range(start, stop)]

    def _parts(self, states: list[_Sequence], new: tuple[int, ...]) -> list[_Run | _Gather]:
        parts: list[_Run | _Gather] = []
        for state, queries in zip(states, new, strict=True):
            needed = self._blocks_for(state.length)
            first = state.blocks[0] if needed else 0
            alone: _Run | _Gather
            if state.blocks[:needed] == list(range(first, first + needed)):
                alone = _Run(queries, state.length, 1, first * self.block_size, 0)
            else:
                alone = _Gather(queries, state.length, state.blocks[:needed])
            joined = _join(parts[-1], alone) if parts else None
            if joined is None:
                parts.append(alone)
            else:
                parts[-1] = joined
        return [self._located(part) if isinstance(part, _Gather) else part for part in parts]

    def _located(self, part: _Gather) -> _Gather:
        return part._replace(slots=indices(self._slots_of_blocks(part.blocks), self.slots.device))

    def _view(self, slots: Tensor, part: _Run | _Gather) -> KVView:
        _, _, kv_heads, head_dim = slots.shape
        if isinstance(part, _Gather):
            room = self._blocks_for(part.length) * self.block_size
            shape = (-1, room, kv_heads, head_dim)
            keys, values = (half.index_select(0, part.slots).view(shape)[:, : part.length] for half in slots)
            return KVView(keys, values, part.queries)
        slot = kv_heads * head_dim
        shape = (part.sequences, part.length, kv_heads, head_dim)
        strides = (part.distance * slot, slot, head_dim, 1)
        keys, values = (
            half.as_strided(shape, strides, half.storage_offset() + part.first_slot * slot) for half in slots
        )
        return KVView(keys, values, part.queries)


def _join(part: _Run | _Gather, alone: _Run | _Gather) -> _Run | _Gather | None:
    """The part with one more sequence, where that is of its sort."""
    if (part.queries, part.length) != (alone.queries, alone.length):
        return None
    if isinstance(part, _Run) and isinstance(alone, _Run):
        return _join_runs(part, alone)
    if isinstance(part, _Gather) and isinstance(alone, _Gather):
        return part._replace(blocks=part.blocks + alone.blocks)
    return None


def _join_runs(run: _Run, alone: _Run) -> _Run | None:
    """The run with one more sequence, where the sequence continues its pattern."""
    distance = alone.first_slot - (run.first_slot + (run.sequences - 1) * run.distance)
    if distance <= 0 or run.distance not in (0, distance):
        return None
    return run._replace(sequences=run.sequences + 1, distance=distance)


class _FreeBlocks:
    """The free blocks; hands out neighbours where it can."""

    def __init__(self, blocks: int) -> None:
        self.count = self.total = blocks
        self._is_free = bytearray(b"\1" * blocks)
        self._further_users: Counter[int] = Counter()

    def require(self, blocks: int) -> None:
        if blocks > self.count:
            what = f"the KV cache has {self.count} free blocks of {self.total}, {blocks} are needed"
            raise OutOfBlocks(f"{what}; make it larger, or run fewer or shorter sequences at once")

    def take(self, blocks: int, after: int = -1) -> list[int]:
        """That many blocks: those that follow `after` if they are free, else the first that lie together."""
        self.require(blocks)
        wanted = b"\1" * blocks
        following = range(after + 1, after + 1 + blocks)
        if after >= 0 and self._is_free[following.start : following.stop] == wanted:
            taken = list(following)
        elif (start := self._is_free.find(wanted)) >= 0:
            taken = list(range(start, start + blocks))
        else:
            taken = [block for block, free in enumerate(self._is_free) if free][:blocks]
        for block in taken:
            self._is_free[block] = 0
        self.count -= blocks
        return taken

    def share(self, blocks: list[int]) -> None:
        """One more user of blocks that somebody has; they are free when all have given them back."""
        self._further_users.update(blocks)

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._further_users[block]:
                self._further_users[block] -= 1
            else:
                self._is_free[block] = 1
                self.count += 1
