"""Keys and values of a micro-batch in one layer, copied from the host's KV cache to the accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from ..kernels.attention_functions import KVView
from ..native.attention import LayerAddresses
from ..products.linear import Tensor
from .kv_cache import CachedLayer
from .kv_step import KVStep
from .prompt_views import carved, copy_slots


class LoadedKV:
    """Copies of a micro-batch's cached keys and values on the accelerator, with room for each sequence's new tokens.

    The constructor starts the copies. Attention kernels take this object in place of a `CachedLayer`.

    Args:
        cached: the layer of the host's cache.
        step: the new tokens, with their places in the host's cache.
        slot: flat memory of the accelerator: the first half for keys, the second for values.

    Attributes:
        step: the new tokens, with their places in these copies.
        block_size: number of tokens in a block.
    """

    def __init__(self, cached: CachedLayer, step: KVStep, slot: Tensor) -> None:
        self.step = step.one_after_the_other()
        self._cached = cached
        self._slot = slot
        self.block_size = cached.block_size
        halves = zip(slot.chunk(2), (cached.keys, cached.values), strict=True)
        keys, values = ([*_loaded(memory, there, step)] for memory, there in halves)
        queries = (part.queries for part in step.parts)
        self._views = list(map(KVView, keys, values, queries))

    @property
    def keys(self) -> Tensor:
        """The copied keys (slots, key-value heads, head size)."""
        return self._slot.chunk(2)[0].view(-1, *self._cached.keys.shape[1:])

    @property
    def values(self) -> Tensor:
        """The copied values (slots, key-value heads, head size)."""
        return self._slot.chunk(2)[1].view(-1, *self._cached.keys.shape[1:])

    @property
    def addresses(self) -> LayerAddresses:
        """The addresses of the copied keys and values, as arguments of native attention."""
        keys, values = (half.data_ptr() for half in self._slot.chunk(2))
        return self._cached.addresses._replace(keys=keys, values=values)

    def extended(self, step: KVStep, keys_TKd: Tensor, values_TKd: Tensor) -> list[KVView]:
        """Append the new tokens' keys and values to the copied ones of their sequences; returns views of both.

        step: not used, since the constructor got the step.
        """
        start = 0
        for keys_SLKd, values_SLKd, new in self._views:
            end = start + len(keys_SLKd) * new
            shape = keys_SLKd[:, -new:].shape
            keys_SLKd[:, -new:].copy_(keys_TKd[start:end].reshape(shape))
            values_SLKd[:, -new:].copy_(values_TKd[start:end].reshape(shape))
            start = end
        return self._views


def _loaded(memory: Tensor, cached_NKd: Tensor, step: KVStep) -> Iterator[Tensor]:
    """Copy the keys (or the values) that were cached before a step to flat memory of the accelerator.

    Each contiguous piece is copied by itself: one copy of scattered slots would need GPU memory that the plan does not
    reserve.

    Args:
        memory: the flat memory.
        cached_NKd: a layer's keys or values in the cache, by slot.
        step: the step, with its places in the cache.

    Returns:
        for each of the step's groups of sequences, a tensor (sequences, tokens, key-value heads, head size) in the
        memory, with room for new tokens.
    """
    before = step.before
    for part in step.parts:
        there_SLKd, memory = carved(memory, (part.sequences, part.length, *cached_NKd.shape[1:]))
        for there_LKd, spans in zip(there_SLKd, before, strict=False):
            copy_slots(there_LKd, cached_NKd, spans)
        yield there_SLKd
