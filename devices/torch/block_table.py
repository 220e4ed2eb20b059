"""The blocks of a KV cache: those of each sequence, and the free ones."""

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
    """Blocks with a sequence's tokens, in order, from the token number `first` on."""

    first: int
    blocks: list[int]


class Growth(NamedTuple):
    """A sequence that gets new tokens.

    Attributes:
        past, new: number of its tokens before them, and of them.
        seen: the blocks of tokens that the new ones see; their own too, if nothing is `kept` apart.
        kept: the blocks of tokens that later ones see, where the new ones overwrite some of `seen`; else None.
    """

    past: int
    new: int
    seen: Held
    kept: Held | None = None

    @property
    def length(self) -> int:
        """The number of its tokens from the first block on, new ones included."""
        return self.past + self.new - self.seen.first


class SequenceBlocks(msgspec.Struct):
    """The number of a sequence's tokens, and its blocks in order; the first one begins with the token `first`."""

    length: int
    blocks: list[int]
    first: int = 0

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

    Args:
        window: most tokens that a token sees, itself included. A block that has left the window is the sequence's next
            one, unless others share it. None keeps all tokens.
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
        """Begin a sequence, and reserve blocks for `tokens` tokens; raises OutOfBlocks if too few are free."""
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
        """Most blocks that a sequence of `tokens` tokens has at once: the window before a token, and one more."""
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
        """The blocks that have tokens of a sequence."""
        return Held(state.first, state.blocks[: self.blocks_for(max(0, state.length - state.first))])

    def _leave(self, states: Iterable[SequenceBlocks], positions: Iterable[int]) -> None:
        """Give back each sequence's blocks whose tokens none from its position on sees."""
        if self._window is None:
            return
        for state, position in zip(states, positions, strict=True):
            left = max(0, position - self._window + 1 - state.first) // self._block_size
            if left:
                state.blocks = state.blocks[left:] + self._free.release(state.blocks[:left])
                state.first += left * self._block_size

    def _lengthen(self, states: Sequence[SequenceBlocks], new: Sequence[int]) -> None:
        """Take the blocks that new tokens need."""
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

    def release(self, blocks: list[int]) -> list[int]:
        """Remove a user from blocks that others have too; returns the blocks that nobody else has."""
        shared = [block for block in blocks if self._further_users[block]]
        self._further_users.subtract(shared)
        return [block for block in blocks if block not in shared]

    def give_back(self, blocks: list[int]) -> None:
        """Remove a user from blocks; those without another one are free."""
        for block in self.release(blocks):
            self._is_free[block] = 1
            self.count += 1
