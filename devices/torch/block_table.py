"""The blocks of a KV cache: those of each sequence, and the free ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import msgspec

from moesched.errors import OverBudget


class OutOfBlocks(OverBudget):
    """The KV cache has fewer free blocks than a sequence needs."""


class SequenceBlocks(msgspec.Struct):
    """The number of a sequence's tokens in the cache, and the numbers of the blocks that hold them, in order."""

    length: int
    blocks: list[int]

    @property
    def last(self) -> int:
        """The number of the last block; -1 without any."""
        return self.blocks[-1] if self.blocks else -1


class BlockCopy(NamedTuple):
    """A block to be copied to another."""

    source: int
    target: int


class BlockTable:
    """Gives blocks of tokens to sequences as they grow, and takes them back.

    Sequences that `reorder` made share full blocks. Several threads may grow and reorder different sequences.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = _FreeBlocks(blocks)
        self._sequences: dict[int, SequenceBlocks] = {}
        self._lock = Lock()

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence has."""
        return self._free.count

    def __getitem__(self, sequence: int) -> SequenceBlocks:
        return self._sequences[sequence]

    def open(self, sequence: int, tokens: int = 0) -> None:
        """Begin a sequence, and reserve blocks for `tokens` tokens; raises OutOfBlocks if too few are free."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already")
        blocks = self._free.take(self.blocks_for(tokens))
        self._sequences[sequence] = SequenceBlocks(0, blocks)

    def close(self, sequence: int) -> None:
        """End a sequence and free its blocks."""
        self._free.give_back(self._sequences.pop(sequence).blocks)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self._block_size)

    def grow(self, sequences: Sequence[int], new: Sequence[int]) -> list[SequenceBlocks]:
        """Add new[i] tokens to sequences[i]; returns the grown sequences' tokens and blocks.

        Raises:
            OutOfBlocks: there are not enough free blocks; nothing has changed.
        """
        states = [self._sequences[sequence] for sequence in sequences]
        lengths = [state.length + tokens for state, tokens in zip(states, new, strict=True)]
        missing = [
            max(0, self.blocks_for(length) - len(state.blocks))
            for state, length in zip(states, lengths, strict=True)
        ]
        with self._lock:
            self._free.require(sum(missing))
            for state, blocks, length in zip(states, missing, lengths, strict=True):
                if blocks:
                    state.blocks += self._free.take(blocks, after=state.last)
                state.length = length
        return states

    def reorder(
        self, sequences: Sequence[int], parents: Sequence[int], heirs: Sequence[int]
    ) -> list[BlockCopy]:
        """Replace sequences by others that continue them: heirs[i] continues sequences[parents[i]].

        Full blocks are shared; a partly filled one is copied for every heir except the first.

        Returns:
            the copies to make before an heir is written to.

        Raises:
            OutOfBlocks: there are not enough free blocks for the copies.
        """
        with self._lock:
            before = [self._sequences.pop(sequence) for sequence in sequences]
            partly_filled: list[tuple[int, SequenceBlocks]] = []
            followed: set[int] = set()
            for heir, parent in zip(heirs, parents, strict=True):
                state = before[parent]
                if parent in followed:
                    full, rest = divmod(state.length, self._block_size)
                    split_off = SequenceBlocks(state.length, state.blocks[:full])
                    self._free.share(split_off.blocks)
                    if rest:
                        partly_filled.append((state.blocks[full], split_off))
                    state = split_off
                followed.add(parent)
                self._sequences[heir] = state
            for number, state in enumerate(before):
                if number not in followed:
                    self._free.give_back(state.blocks)
            return self._copied(partly_filled)

    def _copied(self, partly_filled: Sequence[tuple[int, SequenceBlocks]]) -> list[BlockCopy]:
        """Give each of these sequences a new last block; returns the copies that fill them."""
        self._free.require(len(partly_filled))
        for _, state in partly_filled:
            state.blocks += self._free.take(1, after=state.last)
        return [BlockCopy(source, state.last) for source, state in partly_filled]


class _FreeBlocks:
    """The free blocks; a sequence gets neighbouring ones if possible."""

    def __init__(self, blocks: int) -> None:
        self.count = self.total = blocks
        self._is_free = bytearray(b"\1" * blocks)
        self._further_users: Counter[int] = Counter()

    def require(self, blocks: int) -> None:
        if blocks > self.count:
            what = f"the KV cache has {self.count} free blocks of {self.total}, {blocks} are needed"
            raise OutOfBlocks(f"{what}; make it larger, or run fewer or shorter sequences at once")

    def take(self, blocks: int, after: int = -1) -> list[int]:
        """Take `blocks` blocks: those that follow `after` if they are free, otherwise the first contiguous ones."""
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
        """Add a user to blocks that are in use; they are free when all users have released them."""
        self._further_users.update(blocks)

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._further_users[block]:
                self._further_users[block] -= 1
            else:
                self._is_free[block] = 1
                self.count += 1
