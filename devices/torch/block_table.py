"""The block table of a KV cache: the blocks of each sequence, and the free blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import add
from threading import Lock
from typing import NamedTuple

import msgspec

from moesched.errors import OverBudget


class OutOfBlocks(OverBudget):
    """The KV cache has fewer free blocks than a sequence needs."""


class Held(NamedTuple):
    """The blocks that hold a sequence's tokens, in order; `first` is the number of the first block's first token."""

    first: int
    blocks: list[int]


class Growth(NamedTuple):
    """The growth of a sequence by new tokens.

    Attributes:
        past: number of its tokens before.
        new: number of new tokens.
        seen: the blocks with the tokens that the new ones see; with the new ones too, unless `kept` has them.
        kept: the blocks with the tokens that later ones will see, where storing the new tokens overwrites some of
            `seen`: within a window; otherwise None.
    """

    past: int
    new: int
    seen: Held
    kept: Held | None = None

    @property
    def length(self) -> int:
        """The number of its tokens that are in the blocks `seen`, new ones included."""
        return self.past + self.new - self.seen.first


class SequenceBlocks(msgspec.Struct):
    """A sequence's number of tokens, and its blocks in order; `first` is the number of the first token in them."""

    length: int
    blocks: list[int]
    first: int = 0

    @property
    def last(self) -> int:
        """The number of the last block; -1 without any."""
        return self.blocks[-1] if self.blocks else -1


class BlockCopy(NamedTuple):
    """The copy of a block to another, by their numbers."""

    source: int
    target: int


class BlockTable:
    """Gives blocks of tokens to sequences as they grow, and takes them back.

    Sequences that `reorder` made share full blocks. Several threads may grow and reorder different sequences.

    Args:
        blocks: number of blocks.
        block_size: tokens in a block.
        window: most tokens that a token sees, itself included. A sequence uses a block that has left the window again,
            unless others share it. None keeps all tokens.
    """

    def __init__(self, blocks: int, block_size: int, window: int | None = None) -> None:
        self._block_size = block_size
        self._window = window
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
        """Begin a sequence, and reserve blocks for `tokens` tokens.

        Raises:
            OutOfBlocks: too few blocks are free.
            ValueError: the sequence is open already.
        """
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already")
        blocks = self._free.take(self.most_blocks(tokens))
        self._sequences[sequence] = SequenceBlocks(0, blocks)

    def close(self, sequence: int) -> None:
        """End a sequence and free its blocks."""
        self._free.give_back(self._sequences.pop(sequence).blocks)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self._block_size)

    def most_blocks(self, tokens: int) -> int:
        """Most blocks that a sequence of `tokens` tokens has at once; a window needs its blocks and one more."""
        blocks = self.blocks_for(tokens)
        return blocks if self._window is None else min(blocks, self.blocks_for(self._window - 1) + 1)

    def grow(self, sequences: Sequence[int], new: Sequence[int]) -> list[Growth]:
        """Add new[i] tokens to sequences[i].

        Raises:
            OutOfBlocks: there are not enough free blocks; no sequence has grown.
        """
        states = [self._sequences[sequence] for sequence in sequences]
        past = [state.length for state in states]
        with self._lock:
            self._leave(states, past)
            if self._window is None or max(new, default=0) <= 1:
                self._lengthen(states, new)
                return list(map(Growth, past, new, map(self._held, states)))
            seen = list(map(self._held, states))
            self._leave(states, map(add, past, new))
            self._lengthen(states, new)
            return list(map(Growth, past, new, seen, map(self._held, states)))

    def _held(self, state: SequenceBlocks) -> Held:
        """The blocks of a sequence that have tokens, without those that are only reserved."""
        return Held(state.first, state.blocks[: self.blocks_for(max(0, state.length - state.first))])

    def _leave(self, states: Iterable[SequenceBlocks], positions: Iterable[int]) -> None:
        """Take from each sequence the blocks that have left the window of the token at its position.

        They go to the end of its blocks, to be used again; those that others share are given up.
        """
        if self._window is None:
            return
        for state, position in zip(states, positions, strict=True):
            left = max(0, position - self._window + 1 - state.first) // self._block_size
            if left:
                state.blocks = state.blocks[left:] + self._free.release(state.blocks[:left])
                state.first += left * self._block_size

    def _lengthen(self, states: Sequence[SequenceBlocks], new: Sequence[int]) -> None:
        """Lengthen sequences by new tokens, and take the blocks that these need."""
        lengths = [state.length + tokens for state, tokens in zip(states, new, strict=True)]
        missing = [
            max(0, self.blocks_for(length - state.first) - len(state.blocks))
            for state, length in zip(states, lengths, strict=True)
        ]
        self._free.require(sum(missing))
        for state, blocks, length in zip(states, missing, lengths, strict=True):
            if blocks:
                state.blocks += self._free.take(blocks, after=state.last)
            state.length = length

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
                    full, rest = divmod(state.length - state.first, self._block_size)
                    split_off = SequenceBlocks(state.length, state.blocks[:full], state.first)
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
        """Give each sequence a last block of its own; returns the copies of partly filled blocks into these."""
        self._free.require(len(partly_filled))
        for _, state in partly_filled:
            state.blocks += self._free.take(1, after=state.last)
        return [BlockCopy(source, state.last) for source, state in partly_filled]


class _FreeBlocks:
    """Keeps the free blocks, and counts the users of shared ones; a sequence gets neighbouring blocks if possible."""

    def __init__(self, blocks: int) -> None:
        self.count = self.total = blocks
        self._is_free = bytearray(b"\1" * blocks)
        self._further_users: Counter[int] = Counter()

    def require(self, blocks: int) -> None:
        """Raise OutOfBlocks if fewer blocks are free."""
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

    def release(self, blocks: list[int]) -> list[int]:
        """Remove a user from the blocks that others use, too; returns the other blocks."""
        shared = {block for block in blocks if self._further_users[block]}
        self._further_users.subtract(shared)
        return [block for block in blocks if block not in shared]

    def give_back(self, blocks: list[int]) -> None:
        """Remove a user from blocks; those without another user become free."""
        for block in self.release(blocks):
            self._is_free[block] = 1
            self.count += 1
