"""The KV cache: one arena cut into blocks of tokens, and the views of it that attention reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from moesched.errors import BadInput
from moesched.models.config import ModelConfig

from ..native.attention import CachedLayer, SequencesInBlocks
from .block_table import BlockTable, SequenceBlocks
from .copies import indices
from .kernels import KVView

Tensor = torch.Tensor


class _Run(NamedTuple):
    """Sequences of one length whose slots are evenly spaced, so that one strided view shows them all."""

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
    """The new tokens of some sequences, with their places in the cache.

    past, new: tokens of each sequence before the step, and in it. positions_T: of the new tokens in their
    sequences. slots_T: of the new tokens in the arena. last_S: each sequence's last token among the T. in_blocks: all
    tokens' blocks.
    """

    sequences: tuple[int, ...]
    past: tuple[int, ...]
    new: tuple[int, ...]
    positions_T: Tensor
    slots_T: Tensor
    last_S: Tensor
    parts: tuple[_Run | _Gather, ...]
    in_blocks: SequencesInBlocks


class BlockedKV:
    """Keys and values of all layers, (layers, 2, slots, K, d), in blocks of slots.

    A sequence may reserve blocks for its final length when it is opened, which keeps them contiguous and its views free
    of copies, or take them as it grows. `append` and `views` may run concurrently with everything else, for steps that
    `extend` returned.

    Attributes:
        table: the blocks of each sequence; opens and closes sequences.
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
        self.table = BlockTable(blocks, block_size)
        self._half_bytes = self.slots.nbytes // (2 * config.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena, as `kv_bytes` of the layout gives them."""
        return self.slots.nbytes

    def extend(self, sequences: Sequence[int], new: Sequence[int]) -> KVStep:
        """Extend sequences[i] by new[i] tokens, which count from now on.

        Raises:
            OutOfBlocks: there are not enough free blocks; nothing has changed.
        """
        device = self.slots.device
        extended = self.table.grow(sequences, new)
        past = tuple(held.length - tokens for held, tokens in zip(extended, new, strict=True))
        spans = [range(start, held.length) for held, start in zip(extended, past, strict=True)]
        slots = [
            slot for held, span in zip(extended, spans, strict=True) for slot in self._slots_at(held, span)
        ]
        last = [stop - 1 for stop in accumulate(new)]
        return KVStep(
            tuple(sequences),
            past,
            tuple(new),
            indices(list(chain.from_iterable(spans)), device),
            indices(slots, device),
            indices(last, device),
            tuple(self._parts(extended, new)),
            self._in_blocks(extended),
        )

    def reorder(self, sequences: Sequence[int], parents: Sequence[int], heirs: Sequence[int]) -> None:
        """Replace sequences by others that continue them: heirs[i] continues sequences[parents[i]].

        Raises:
            OutOfBlocks: there are not enough to give each heir a last block of its own.
        """
        copies = self.table.reorder(sequences, parents, heirs)
        if copies:
            sources, targets = (
                indices(self._slots_of(blocks), self.slots.device) for blocks in zip(*copies, strict=True)
            )
            self.slots.index_copy_(2, targets, self.slots.index_select(2, sources))

    def append(self, layer: int, step: KVStep, keys_TKd: Tensor, values_TKd: Tensor) -> None:
        """Store the new tokens' keys and values of one layer."""
        self.slots[layer, 0].index_copy_(0, step.slots_T, keys_TKd)
        self.slots[layer, 1].index_copy_(0, step.slots_T, values_TKd)

    def views(self, layer: int, step: KVStep) -> list[KVView]:
        """The cached keys and values of the step's sequences, in the step's order, new tokens included.

        Views of the arena if a sequence's blocks are contiguous, otherwise copies.
        """
        return [self._view(self.slots[layer], part) for part in step.parts]

    def layer(self, layer: int) -> CachedLayer:
        """A layer's keys and values, for native attention."""
        keys = self.slots.data_ptr() + 2 * layer * self._half_bytes
        return CachedLayer(keys, keys + self._half_bytes, self.block_size)

    def _in_blocks(self, extended: Sequence[SequenceBlocks]) -> SequencesInBlocks:
        blocks = array("q")
        for held in extended:
            blocks.extend(held.blocks[: self.table.blocks_for(held.length)])
        return SequencesInBlocks(array("q", [held.length for held in extended]), blocks)

    def _slots_of(self, blocks: Sequence[int]) -> list[int]:
        """The slots of whole blocks."""
        size = self.block_size
        return [slot for block in blocks for slot in range(block * size, (block + 1) * size)]

    def _slots_at(self, held: SequenceBlocks, positions: range) -> list[int]:
        """The slots of a sequence's tokens at these positions."""
        size = self.block_size
        return [held.blocks[i // size] * size + i % size for i in positions]

    def _parts(self, extended: Sequence[SequenceBlocks], new: Sequence[int]) -> list[_Run | _Gather]:
        parts: list[_Run | _Gather] = []
        for held, queries in zip(extended, new, strict=True):
            needed = self.table.blocks_for(held.length)
            first = held.blocks[0] if needed else 0
            alone: _Run | _Gather
            if held.blocks[:needed] == list(range(first, first + needed)):
                alone = _Run(queries, held.length, 1, first * self.block_size, 0)
            else:
                alone = _Gather(queries, held.length, held.blocks[:needed])
            joined = _join(parts[-1], alone) if parts else None
            if joined is None:
                parts.append(alone)
            else:
                parts[-1] = joined
        return [self._located(part) if isinstance(part, _Gather) else part for part in parts]

    def _located(self, part: _Gather) -> _Gather:
        return part._replace(slots=indices(self._slots_of(part.blocks), self.slots.device))

    def _view(self, slots: Tensor, part: _Run | _Gather) -> KVView:
        _, _, kv_heads, head_dim = slots.shape
        if isinstance(part, _Gather):
            room = self.table.blocks_for(part.length) * self.block_size
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
    """The part with one more sequence; None if they do not fit together."""
    if (part.queries, part.length) != (alone.queries, alone.length):
        return None
    if isinstance(part, _Run) and isinstance(alone, _Run):
        return _join_runs(part, alone)
    if isinstance(part, _Gather) and isinstance(alone, _Gather):
        return part._replace(blocks=part.blocks + alone.blocks)
    return None


def _join_runs(run: _Run, alone: _Run) -> _Run | None:
    """The run with one more sequence; None if that does not continue its pattern."""
    distance = alone.first_slot - (run.first_slot + (run.sequences - 1) * run.distance)
    if distance <= 0 or run.distance not in (0, distance):
        return None
    return run._replace(sequences=run.sequences + 1, distance=distance)
