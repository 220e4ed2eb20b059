"""The KV cache: one arena cut into blocks of tokens, which sequences of any length take and give back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from moesched.errors import BadInput, OverBudget
from moesched.models.config import ModelConfig

from .copies import indices
from .torch_kernels import KVView

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
    """A sequence whose blocks are scattered: its slots, to be copied together."""

    queries: int
    slots_L: Tensor


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
    views free of copies, or take them as it grows. Blocks are taken and given back by one thread; `append`
    and `views` may run on others, for steps that were extended before.
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
        self._grow(states, [length + tokens for length, tokens in zip(past, new, strict=True)])
        return self._step(tuple(sequences), states, past, tuple(new))

    def append(self, layer: int, step: KVStep, keys_TKd: Tensor, values_TKd: Tensor) -> None:
        """Store the new tokens' keys and values of one layer."""
        self.slots[layer, 0].index_copy_(0, step.slots_T, keys_TKd)
        self.slots[layer, 1].index_copy_(0, step.slots_T, values_TKd)

    def views(self, layer: int, step: KVStep) -> list[KVView]:
        """What the step's sequences have in the cache, in the step's order, new tokens included.

        Views of the arena where a sequence's blocks lie together, copies where they do not.
        """
        return [self._view(self.slots[layer], part) for part in step.parts]

    # ------------------------------------------------------------ inside

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
            if state.blocks[:needed] != list(range(first, first + needed)):
                slots = indices(self._slots_of(state, 0, state.length), self.slots.device)
                parts.append(_Gather(queries, slots))
                continue
            alone = _Run(queries, state.length, 1, first * self.block_size, 0)
            joined = _join(parts[-1], alone) if parts else None
            if joined is None:
                parts.append(alone)
            else:
                parts[-1] = joined
        return parts

    def _view(self, slots: Tensor, part: _Run | _Gather) -> KVView:
        if isinstance(part, _Gather):
            keys, values = (half.index_select(0, part.slots_L)[None] for half in slots)
            return KVView(keys, values, part.queries)
        _, _, kv_heads, head_dim = slots.shape
        slot = kv_heads * head_dim
        shape = (part.sequences, part.length, kv_heads, head_dim)
        strides = (part.distance * slot, slot, head_dim, 1)
        keys, values = (
            half.as_strided(shape, strides, half.storage_offset() + part.first_slot * slot) for half in slots
        )
        return KVView(keys, values, part.queries)


def _join(run: _Run | _Gather, alone: _Run) -> _Run | None:
    """The run with one more sequence, where the sequence continues its pattern."""
    if isinstance(run, _Gather) or (run.queries, run.length) != (alone.queries, alone.length):
        return None
    distance = alone.first_slot - (run.first_slot + (run.sequences - 1) * run.distance)
    if distance <= 0 or run.distance not in (0, distance):
        return None
    return run._replace(sequences=run.sequences + 1, distance=distance)


class _FreeBlocks:
    """Which blocks nobody has; prefers to give blocks that lie together."""

    def __init__(self, blocks: int) -> None:
        self.count = self.total = blocks
        self._is_free = bytearray(b"\1" * blocks)

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

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._is_free[block] = 1
        self.count += len(blocks)
