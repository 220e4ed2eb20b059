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
    """An error: the KV cache has fewer free blocks than a sequence needs."""


class Held(NamedTuple):
    """The KV cache blocks that hold a sequence's tokens.

    Attributes:
        first: position in the sequence of the first token in the first block.
        blocks: the blocks' numbers, in the order of the tokens.
    """

    first: int
    blocks: list[int]


class Growth(NamedTuple):
    """The growth of a sequence by new tokens.

    Attributes:
        past: number of the sequence's tokens before the step.
        new: number of new tokens.
        seen: the blocks with the tokens that the new tokens attend to. If `kept` is None, the new tokens are stored in
            these blocks, too.
        kept: the blocks that hold the sequence after the step, if they may differ from `seen`; otherwise None. They may
            differ if there is a window, and some sequence of the step has several new tokens. In that case, storing
            the new tokens may overwrite tokens in `seen`.
    """

    past: int
    new: int
    seen: Held
    kept: Held | None = None

    @property
    def length(self) -> int:
        """Number of the sequence's tokens from the first token in the blocks `seen` to the last new token."""
        return self.past + self.new - self.seen.first


class SequenceBlocks(msgspec.Struct):
    """The state of a sequence in the block table.

    Attributes:
        length: number of the sequence's tokens.
        blocks: the numbers of its blocks, in the order of the tokens; blocks reserved for later tokens are at the end.
        first: position of the first token that is still in the blocks; above 0 only with a window.
    """

    length: int
    blocks: list[int]
    first: int = 0

    @property
    def last(self) -> int:
        """The number of the sequence's last block; -1 if the sequence has no blocks."""
        return self.blocks[-1] if self.blocks else -1


class BlockCopy(NamedTuple):
    """The numbers of two blocks; the caller has to copy the contents of `source` to `target`."""

    source: int
    target: int


class BlockTable:
    """Gives blocks of tokens to sequences as they grow, and takes them back.

    Sequences that `reorder` made share full blocks. Several threads may grow and reorder different sequences.

    Args:
        blocks: number of blocks.
        block_size: number of tokens in a block.
        window: number of tokens that a token attends to, itself included; None for all earlier ones. When all tokens of
            a block have left the window, the sequence uses the block for new tokens, unless other sequences share it.
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
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self._block_size)

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks that a sequence of `tokens` tokens has at the same time.

        With a window, the sequence has at most the blocks for `window` - 1 tokens, and one more block, since the first
        token of the window may be the last one in its block.
        """
        blocks = self.blocks_for(tokens)
        return blocks if self._window is None else min(blocks, self.blocks_for(self._window - 1) + 1)

    def grow(self, sequences: Sequence[int], new: Sequence[int]) -> list[Growth]:
        """Lengthen each sequence `sequences[i]` by `new[i]` tokens, and give it blocks for these tokens.

        Returns:
            the growth of each sequence, in the same order.

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
        """Return the blocks that contain tokens of a sequence; blocks that are only reserved are left out."""
        return Held(state.first, state.blocks[: self.blocks_for(max(0, state.length - state.first))])

    def _leave(self, states: Iterable[SequenceBlocks], positions: Iterable[int]) -> None:
        """Remove from the front of each sequence the blocks whose tokens have all left the window.

        These blocks move to the end of the sequence's blocks, to be used again. Blocks that other sequences share are
        released instead.

        Args:
            states: the sequences.
            positions: for each sequence, the position of its next token, which is the last one in the window.
        """
        if self._window is None:
            return
        for state, position in zip(states, positions, strict=True):
            left = max(0, position - self._window + 1 - state.first) // self._block_size
            if left:
                state.blocks = state.blocks[left:] + self._free.release(state.blocks[:left])
                state.first += left * self._block_size

    def _lengthen(self, states: Sequence[SequenceBlocks], new: Sequence[int]) -> None:
        """Lengthen sequences by new tokens; a sequence whose blocks have too little room gets free blocks as well."""
        lengths = [state.length + tokens for state, tokens in zip(states, new, strict=True)]
        missing = [
            max(0, self.blocks_for(length - state.first) - len(state.blocks))
            for state, length in zip(states, lengths, strict=True)
        ]
        if any(missing):
            self._free.require(sum(missing))
            for state, blocks in zip(states, missing, strict=True):
                state.blocks += self._free.take(blocks, after=state.last)
        for state, length in zip(states, lengths, strict=True):
            state.length = length

    def reorder(
        self, sequences: Sequence[int], parents: Sequence[int], children: Sequence[int]
    ) -> list[BlockCopy]:
        """Replace sequences by others that continue them: children[i] continues sequences[parents[i]].

        The children of a sequence share its full blocks. A partly filled block stays with the first child, and is
        copied for each of the other children.

        Args:
            sequences: numbers of the sequences, which end.
            parents: for each child the index of its parent in `sequences`.
            children: numbers of the new sequences.

        Returns:
            the copies that have to be made before tokens are added to a child.

        Raises:
            OutOfBlocks: there are not enough free blocks for the copies.
        """
        with self._lock:
            before = [self._sequences.pop(sequence) for sequence in sequences]
            partly_filled: list[tuple[int, SequenceBlocks]] = []
            followed: set[int] = set()
            for child, parent in zip(children, parents, strict=True):
                state = before[parent]
                if parent in followed:
                    full, rest = divmod(state.length - state.first, self._block_size)
                    split_off = SequenceBlocks(state.length, state.blocks[:full], state.first)
                    self._free.share(split_off.blocks)
                    if rest:
                        partly_filled.append((state.blocks[full], split_off))
                    state = split_off
                followed.add(parent)
                self._sequences[child] = state
            for number, state in enumerate(before):
                if number not in followed:
                    self._free.give_back(state.blocks)
            return self._copied(partly_filled)

    def _copied(self, partly_filled: Sequence[tuple[int, SequenceBlocks]]) -> list[BlockCopy]:
        """Give each sequence a block of its own for the tokens of a partly filled block; returns the copies to make.

        partly_filled: pairs of the number of a partly filled block, and the sequence that gets a copy of it.
        """
        self._free.require(len(partly_filled))
        for _, state in partly_filled:
            state.blocks += self._free.take(1, after=state.last)
        return [BlockCopy(source, state.last) for source, state in partly_filled]


class _FreeBlocks:
    """Keeps track of free blocks, and counts users of shared blocks; hands out neighbouring blocks if possible."""

    def __init__(self, blocks: int) -> None:
        self.count = self.total = blocks
        self._is_free = bytearray(b"\1" * blocks)
        self._further_users: Counter[int] = Counter()

    def require(self, blocks: int) -> None:
        """Raise OutOfBlocks if fewer than `blocks` blocks are free."""
        if blocks > self.count:
            what = f"the KV cache has {self.count} free blocks of {self.total}, {blocks} are needed"
            raise OutOfBlocks(f"{what}; make it larger, or run fewer or shorter sequences at once")

    def take(self, blocks: int, after: int = -1) -> list[int]:
        """Take `blocks` free blocks, contiguous ones if possible; returns their numbers.

        after: the block whose successors are taken if these are free; -1 for none.
        """
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
        """Add one user to each of these used blocks; a block becomes free once all users have released it."""
        self._further_users.update(blocks)

    def release(self, blocks: list[int]) -> list[int]:
        """Remove one user from each block that has several users; returns the blocks that had only one user."""
        shared = {block for block in blocks if self._further_users[block]}
        self._further_users.subtract(shared)
        return [block for block in blocks if block not in shared]

    def give_back(self, blocks: list[int]) -> None:
        """Remove one user from each of these blocks; blocks without another user become free."""
        for block in self.release(blocks):
            self._is_free[block] = 1
            self.count += 1
