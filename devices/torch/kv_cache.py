"""The KV cache: one arena cut into blocks of tokens, and the views of the arena that attention reads.

Shapes in names and texts: T new tokens, K key-value heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from moesched.errors import BadInput
from moesched.models.config import ModelConfig

from ..kernels.attention_functions import KVView
from ..kernels.resources import Indices, host_indices
from ..native.attention import LayerAddresses
from ..native.kernels import NativeKernels
from ..native.kv_rows import store
from ..products.team import use_cores
from .block_table import BlockTable
from .kv_step import Gather, KVStep, Run, slots_of
from .prompt_views import prompt_views

Tensor = torch.Tensor


class BlockedKV:
    """A KV cache of layers that have the same attention window: one tensor, the arena.

    The arena has the shape (layers, 2, slots, K, d), with 2 for keys and values. Slots are grouped in blocks. When a
    sequence is opened, it may reserve blocks for its final length. If these blocks are contiguous, as they are where
    possible, views of the sequence need no copies. A sequence without reserved blocks takes blocks as it grows. Once
    `extend` has returned a step, `append` and `views` for this step may run at the same time as all other calls.

    Args:
        blocks: number of blocks.
        block_size: number of tokens in a block, each in one slot.
        layers: numbers of the layers that are cached here; None for all layers of the model.
        indices: a function that makes an int64 tensor on the cache's device from a sequence of numbers.
        allocate: a function that takes a number of bytes, and returns a uint8 tensor with as many for the arena; None
            for memory from torch.
        kernels: native kernels that write to a cache on the host; None if torch writes.

    Attributes:
        table: the blocks of each sequence.
        slots: the arena.
        layers: maps the number of each layer that is cached here to its index in the arena.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layers: Sequence[int] | None = None,
        indices: Indices = host_indices,
        allocate: Callable[[int], Tensor] | None = None,
        kernels: NativeKernels | None = None,
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise BadInput(
                f"a KV cache of {blocks} blocks of {block_size} tokens holds nothing; give 1 or more"
            )
        held = range(config.layers) if layers is None else layers
        (self._window,) = {config.layer(layer).grouped.window for layer in held}
        self.layers = {layer: index for index, layer in enumerate(held)}
        attention = config.attention
        shape = (len(held), 2, blocks * block_size, attention.kv_heads, attention.head_dim)
        self.block_size = block_size
        if allocate is None:
            self.slots = torch.empty(shape, dtype=dtype, device=device)
        else:
            self.slots = allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.table = BlockTable(blocks, block_size, self._window)
        self._indices = indices
        self._kernels = kernels
        self._half_bytes = self.slots.nbytes // (2 * len(held))

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.slots.nbytes

    def open(self, sequence: int, tokens: int = 0) -> None:
        """Begin a sequence, and reserve blocks for `tokens` tokens; the sequence takes more blocks if it grows beyond.

        Raises:
            OutOfBlocks: there are not enough free blocks; nothing has changed.
        """
        self.table.open(sequence, tokens)

    def close(self, sequence: int) -> None:
        """End a sequence, and free its blocks."""
        self.table.close(sequence)

    def extend(self, sequences: Sequence[int], new: Sequence[int]) -> KVStep:
        """Make room for `new[i]` more tokens of each sequence `sequences[i]`; returns a step with their slots.

        Raises:
            OutOfBlocks: there are not enough free blocks; nothing has changed.
        """
        return KVStep(sequences, self.table.grow(sequences, new), self.block_size, self._indices)

    def reorder(self, sequences: Sequence[int], parents: Sequence[int], children: Sequence[int]) -> None:
        """Replace sequences by others that continue them: children[i] continues sequences[parents[i]].

        Args:
            sequences: numbers of the sequences, which end.
            parents: for each child the index of its parent in `sequences`.
            children: numbers of the new sequences.

        Raises:
            OutOfBlocks: there are not enough free blocks to give each child a last block of its own.
        """
        copies = self.table.reorder(sequences, parents, children)
        if copies:
            sources, targets = (
                self._indices(slots_of(blocks, self.block_size)) for blocks in zip(*copies, strict=True)
            )
            self.slots.index_copy_(2, targets, self.slots.index_select(2, sources))

    def append(self, layer: int, step: KVStep, keys_TKd: Tensor, values_TKd: Tensor) -> None:
        """Store the keys and values of a step's new tokens in one layer of the cache.

        Args:
            layer: number of the layer.
            keys_TKd, values_TKd: the keys and values of all new tokens; with a window, only those of `step.kept`
                are kept.
        """
        for half, new_TKd in zip(self.slots[self.layers[layer]], (keys_TKd, values_TKd), strict=True):
            if not step.in_place:
                new_TKd = torch.cat([new_TKd[span.start : span.stop] for span in step.kept])
            half.index_copy_(0, step.slots_T, new_TKd)

    def store(self, layer: int, step: KVStep, keys_TKd: Tensor, values_TKd: Tensor, start: int = 0) -> None:
        """Store keys and values of some of a step's new tokens in one layer of a cache on the host.

        Args:
            layer: number of the layer.
            keys_TKd, values_TKd: the keys and values of these tokens: contiguous tensors on the host.
            start: index of the first of these tokens among the new tokens that the cache keeps.
        """
        if self._kernels is not None:
            store(self._kernels, keys_TKd, values_TKd, self.layer(layer), step.slots, start)
            return
        use_cores(1)
        slots_T = step.slots_T[start : start + len(keys_TKd)]
        for half, new_TKd in zip(self.slots[self.layers[layer]], (keys_TKd, values_TKd), strict=True):
            half.index_copy_(0, slots_T, new_TKd)

    def views(self, layer: int, step: KVStep) -> list[KVView]:
        """Return a layer's keys and values of a step's sequences, new tokens included, in the order of the sequences.

        The result has views of the arena for sequences with contiguous blocks, and copies for others.

        step: a step whose keys and values have been stored. Its `in_place` must be True: storing has lost no tokens
            that the new ones attend to.
        """
        return [self._view(self.slots[self.layers[layer]], part) for part in step.parts]

    def at(self, layer: int) -> CachedLayer:
        """Return one layer of the cache, in the form that attention kernels take."""
        return CachedLayer(self, layer)

    def layer(self, layer: int) -> LayerAddresses:
        """Return the addresses of a layer's keys and values, as arguments of native attention."""
        keys = self.slots.data_ptr() + 2 * self.layers[layer] * self._half_bytes
        return LayerAddresses(keys, keys + self._half_bytes, self.block_size, self._window)

    def _view(self, slots: Tensor, part: Run | Gather) -> KVView:
        _, _, kv_heads, head_dim = slots.shape
        if isinstance(part, Gather):
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


class CachedLayer:
    """One layer of a KV cache, in the form that attention kernels take.

    Attributes:
        layer: number of the layer.
        keys, values: all keys and all values of the layer in the cache (slots, K, d).
        block_size: number of tokens in a block.
    """

    def __init__(self, cache: BlockedKV, layer: int) -> None:
        self.cache = cache
        self.layer = layer
        self.keys, self.values = cache.slots[cache.layers[layer]]
        self.block_size = cache.block_size

    @property
    def addresses(self) -> LayerAddresses:
        """The addresses of the layer's keys and values, as arguments of native attention."""
        return self.cache.layer(self.layer)

    def append(self, step: KVStep, keys_TKd: Tensor, values_TKd: Tensor) -> None:
        """Store the keys and values of a step's new tokens in this layer.

        keys_TKd, values_TKd: the keys and values of all new tokens; with a window, only those of `step.kept` are kept.
        """
        self.cache.append(self.layer, step, keys_TKd, values_TKd)

    def extended(self, step: KVStep, keys_TKd: Tensor, values_TKd: Tensor) -> list[KVView]:
        """Store a step's new keys and values; returns views of all keys and values that the new tokens attend to."""
        if step.in_place:
            self.append(step, keys_TKd, values_TKd)
            return self.views(step)
        seen = prompt_views(step, (self.keys, self.values), (keys_TKd, values_TKd))
        self.append(step, keys_TKd, values_TKd)
        return seen

    def views(self, step: KVStep) -> list[KVView]:
        """Return keys and values of a step's sequences, new tokens included; the step's `in_place` must be True."""
        return self.cache.views(self.layer, step)
