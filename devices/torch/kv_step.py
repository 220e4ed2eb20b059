"""A step in a KV cache: the new tokens of some sequences, with the blocks and slots that they are stored in."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, count
from typing import NamedTuple

import torch

from ..kernels.resources import Indices, host_indices
from ..native.attention import SequencesInBlocks
from .block_table import Growth, Held

Tensor = torch.Tensor


class Run(NamedTuple):
    """Neighbouring sequences of a step with evenly spaced slots in the cache, so that one view shows them all.

    Attributes:
        queries: number of new tokens of each sequence.
        length: number of tokens of each sequence that the view shows, new ones included.
        sequences: number of sequences.
        first_slot: slot of the first sequence's first token.
        distance: number of slots from the first token of a sequence to that of the next; 0 for a single sequence.
    """

    queries: int
    length: int
    sequences: int
    first_slot: int
    distance: int


class Gather(NamedTuple):
    """Neighbouring sequences of a step with scattered blocks, whose keys and values are copied together for attention.

    Each sequence's copy begins at the start of a block, as in the cache, so that attention has the same bits as with a
    view of the cache.

    Attributes:
        queries: number of new tokens of each sequence.
        length: number of tokens of each sequence that are copied, new ones included.
        sequences: number of sequences.
        blocks: the blocks of all sequences, in order.
        slots: the numbers of all slots in the blocks; None until the tensor is made.
    """

    queries: int
    length: int
    sequences: int
    blocks: list[int]
    slots: Tensor | None = None


class KVStep:
    """The new tokens of some sequences in one step, and their places in a KV cache. Tensors are made when first needed.

    A cache with a window keeps only tokens that later tokens will attend to. If a sequence has many new tokens, only
    the last ones are kept.

    Args:
        sequences: numbers of the sequences.
        growths: for each sequence a `Growth`: numbers of earlier and of new tokens, and blocks.
        block_size: number of tokens in a block.
        indices: a function that makes an int64 tensor on the cache's device from a sequence of numbers.

    Attributes:
        past: number of tokens of each sequence before the step.
        new: number of new tokens of each sequence.
        one_each: whether each sequence has one new token.
        in_place: True if storing the new tokens in the cache loses no tokens that the new ones attend to; False if it
            may overwrite some, which takes a window and several new tokens of a sequence.
    """

    def __init__(
        self, sequences: Sequence[int], growths: Sequence[Growth], block_size: int, indices: Indices
    ) -> None:
        self.sequences = tuple(sequences)
        self.past: tuple[int, ...]
        self.new: tuple[int, ...]
        self.past, self.new, _, kept = zip(*growths, strict=True) if growths else ((),) * 4
        self.one_each = self.new.count(1) == len(self.new)
        self.in_place = kept.count(None) == len(kept)
        self._block_size = block_size
        self._indices = indices
        self._growths = growths
        self._table: Tensor | None = None

    @cached_property
    def in_blocks(self) -> SequencesInBlocks:
        """The blocks of all sequences, and each sequence's number of tokens in its blocks, new ones included."""
        lengths, blocks = array("q"), array("q")
        for past, new, seen, _ in self._growths:
            lengths.append(past + new - seen.first)
            blocks.extend(seen.blocks)
        return SequencesInBlocks.of(lengths, blocks)

    @property
    def on_host(self) -> bool:
        """True if the cache is in the host's memory."""
        return self._indices is host_indices

    @property
    def listed(self) -> array[int]:
        """The integers that GPU kernels read, in one array of three parts.

        These are: for each sequence the number of tokens in its blocks; for each sequence the index of its first block
        in the third part; the blocks of all sequences.
        """
        lengths, blocks, _ = self.in_blocks
        counts = (len(growth.seen.blocks) for growth in self._growths[:-1])
        return lengths + array("q", accumulate(counts, initial=0)) + blocks

    @property
    def numbers(self) -> list[array[int]]:
        """All arrays of integers that attention on a GPU reads.

        If each sequence has one new token, this is only `listed`. Otherwise `slots` and an array with the numbers in
        `starts` follow.
        """
        return [self.listed] if self.one_each else [self.listed, self.slots, self._firsts]

    def keep(self, table: Tensor, slots_T: Tensor | None = None, starts: Tensor | None = None) -> None:
        """Keep the tensors on the accelerator that the arrays of `numbers` were copied to, for later use.

        Args:
            table: a copy of `listed`.
            slots_T, starts: copies of the two other arrays; both None if each sequence has one new token.
        """
        self._table = table
        if slots_T is not None and starts is not None:
            self.slots_T, self.starts = slots_T, starts

    def table(self, upload: Indices) -> Tensor:
        """Return the integers of `listed` as a tensor on the accelerator; the tensor is made once and kept.

        upload: a function that makes an int64 tensor from integers; not called once the tensor is there.
        """
        if self._table is None:
            self._table = upload(self.listed)
        return self._table

    @property
    def positions(self) -> list[int]:
        """The position of each new token in its sequence, counted from 0."""
        if self.one_each:
            return list(self.past)
        return [at for past, new in zip(self.past, self.new, strict=True) for at in range(past, past + new)]

    @property
    def last(self) -> list[int]:
        """The index of each sequence's last new token among the new tokens of all sequences."""
        return [stop - 1 for stop in accumulate(self.new)]

    @cached_property
    def slots(self) -> array[int]:
        """The slots of all new tokens that the cache keeps, in order."""
        slots = array("q")
        for growth in self._growths:
            first, blocks = growth.kept or growth.seen
            stop = growth.past + growth.new
            tokens = range(max(growth.past, first) - first, stop - first)
            for part in _ranges(blocks, tokens, self._block_size):
                slots.extend(part)
        return slots

    @cached_property
    def kept(self) -> list[range]:
        """The new tokens that the cache keeps, as ranges of indices among the new tokens of all sequences."""
        if self.in_place:
            return [range(sum(self.new))]
        kept = []
        for growth, stop in zip(self._growths, accumulate(self.new), strict=True):
            first = growth.seen.first if growth.kept is None else growth.kept.first
            kept.append(range(stop - min(growth.new, growth.past + growth.new - first), stop))
        return kept

    @cached_property
    def slots_T(self) -> Tensor:
        """The array `slots` as a tensor on the cache's device."""
        return self._indices(self.slots)

    @cached_property
    def starts(self) -> Tensor:
        """The index of each sequence's first new token among all new tokens, followed by the number of all new tokens.

        The result is a tensor on the cache's device.
        """
        return self._indices(self._firsts)

    @property
    def _firsts(self) -> array[int]:
        return array("q", accumulate(self.new, initial=0))

    @cached_property
    def parts(self) -> list[Run | Gather]:
        """Groups of the step's sequences, in order.

        The keys and values of a `Run` are one view of the KV cache. Those of a `Gather` are copied from it together.
        """
        parts: list[Run | Gather] = []
        for growth in self._growths:
            alone = self._alone(growth.seen.blocks, growth.length, growth.new)
            joined = _join(parts[-1], alone) if parts else None
            if joined is None:
                parts.append(alone)
            else:
                parts[-1] = joined
        return [self._located(part) if isinstance(part, Gather) else part for part in parts]

    @property
    def before(self) -> Iterator[list[range]]:
        """For each sequence, the slots of its tokens from before the step, in order, as the fewest possible ranges."""
        for growth in self._growths:
            tokens = range(growth.past - growth.seen.first)
            yield _ranges(growth.seen.blocks, tokens, self._block_size)

    def one_after_the_other(self) -> KVStep:
        """Return a copy of this step with blocks renumbered 0, 1, 2, ..., for memory that holds only its sequences."""
        numbers = count()
        growths = [
            growth._replace(seen=Held(growth.seen.first, [next(numbers) for _ in growth.seen.blocks]))
            for growth in self._growths
        ]
        return KVStep(self.sequences, growths, self._block_size, self._indices)

    def _alone(self, blocks: Sequence[int], length: int, new: int) -> Run | Gather:
        first = blocks[0] if blocks else 0
        if list(blocks) == list(range(first, first + len(blocks))):
            return Run(new, length, 1, first * self._block_size, 0)
        return Gather(new, length, 1, list(blocks))

    def _located(self, part: Gather) -> Gather:
        return part._replace(slots=self._indices(slots_of(part.blocks, self._block_size)))


def _ranges(blocks: Sequence[int], tokens: range, block_size: int) -> list[range]:
    """Return the slots of some tokens of a sequence, in order, as the fewest possible ranges.

    Args:
        blocks: the sequence's blocks.
        tokens: the tokens, counted from the first token in the blocks.
        block_size: number of tokens in a block.
    """
    ranges: list[range] = []
    for number in range(tokens.start // block_size, -(-tokens.stop // block_size)):
        shift = (blocks[number] - number) * block_size
        first = max(tokens.start, number * block_size) + shift
        stop = min(tokens.stop, (number + 1) * block_size) + shift
        if ranges and ranges[-1].stop == first:
            ranges[-1] = range(ranges[-1].start, stop)
        elif stop > first:
            ranges.append(range(first, stop))
    return ranges


def slots_of(blocks: Sequence[int], block_size: int) -> list[int]:
    """List the slots of these blocks, in order.

    block_size: number of slots in a block.
    """
    return [slot for block in blocks for slot in range(block * block_size, (block + 1) * block_size)]


def _join(part: Run | Gather, alone: Run | Gather) -> Run | Gather | None:
    """Add a sequence to a group of sequences; returns the larger group, or None if no single view or copy can show it.

    Args:
        part: the group.
        alone: the sequence to add, as a group of its own.
    """
    if (part.queries, part.length) != (alone.queries, alone.length):
        return None
    if isinstance(part, Run) and isinstance(alone, Run):
        return _join_runs(part, alone)
    if isinstance(part, Gather) and isinstance(alone, Gather):
        return part._replace(sequences=part.sequences + 1, blocks=part.blocks + alone.blocks)
    return None


def _join_runs(run: Run, alone: Run) -> Run | None:
    """Add a sequence to a `Run`; returns the longer run, or None if its sequences would not be evenly spaced.

    alone: the sequence to add, as a `Run` of its own.
    """
    distance = alone.first_slot - (run.first_slot + (run.sequences - 1) * run.distance)
    if distance <= 0 or run.distance not in (0, distance):
        return None
    return run._replace(sequences=run.sequences + 1, distance=distance)
