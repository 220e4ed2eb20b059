"""The KV cache on MLX: two arrays for each layer, in which every request has contiguous slots for its final length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from moesched.models.config import ModelConfig

from ..kernels.mlx_functions import Array, KVView


class KVStep(NamedTuple):
    """The new tokens of some requests, and their slots in the cache.

    Attributes:
        past, new: number of tokens of each request before the step, and in it.
        positions: the new tokens' positions in their requests, int64.
        slots_T: slots of the new tokens in the cache; a slice if they are consecutive.
        last: index of each request's last token among the T new tokens.
        one_each: whether each request has one new token.
    """

    requests: tuple[int, ...]
    past: tuple[int, ...]
    new: tuple[int, ...]
    positions: npt.NDArray[np.int64]
    slots_T: Array | slice
    last: tuple[int, ...]
    one_each: bool


class RequestsKV:
    """A KV cache: keys and values, (slots, K, d) for each layer.

    Args:
        lengths: the most tokens of each request.

    Attributes:
        places: the numbers of the layers that it holds: all.
    """

    def __init__(self, config: ModelConfig, lengths: Sequence[int], dtype: mx.Dtype) -> None:
        self.places = range(config.layers)
        self._length = [0] * len(lengths)
        *self._first, slots = accumulate(lengths, initial=0)
        self._layers = [
            [mx.zeros((slots, each.grouped.kv_heads, each.grouped.head_dim), dtype=dtype) for _ in "kv"]
            for each in config.pattern
        ]
        mx.eval(self._layers)

    def extend(self, requests: Sequence[int], new: Sequence[int]) -> KVStep:
        """Make room for new[i] tokens of requests[i], which count as cached from now on."""
        past = tuple(self._length[request] for request in requests)
        spans = [np.arange(start, start + tokens) for start, tokens in zip(past, new, strict=True)]
        slots = [self._first[request] + span for request, span in zip(requests, spans, strict=True)]
        for request, start, tokens in zip(requests, past, new, strict=True):
            self._length[request] = start + tokens
        last = tuple(int(end) - 1 for end in np.cumsum(new))
        slots_T = _slice_or_array(np.concatenate(slots))
        return KVStep(tuple(requests), past, tuple(new), np.concatenate(spans), slots_T, last, max(new) == 1)

    def at(self, layer: int) -> CachedLayer:
        """The keys and values of a layer, as attention kernels take them."""
        return CachedLayer(self, layer)

    def append(self, layer: int, step: KVStep, keys_TKd: Array, values_TKd: Array) -> None:
        """Store the new tokens' keys and values of one layer."""
        for array, fresh_TKd in zip(self._layers[layer], (keys_TKd, values_TKd), strict=True):
            array[step.slots_T] = fresh_TKd

    def arrays(self, layer: int) -> list[Array]:
        """The arrays of keys and values of one layer, to be evaluated after `append`."""
        return self._layers[layer]

    def views(self, layer: int, step: KVStep) -> list[KVView]:
        """The cached keys and values of the step's requests, in the step's order, new tokens included; no copies."""
        return [self._view(layer, *part) for part in self._parts(step)]

    def _parts(self, step: KVStep) -> list[tuple[int, int, int, list[int]]]:
        """Groups of neighbours for one view each: new tokens, length and distance of all its requests, first slots."""
        parts: list[tuple[int, int, int, list[int]]] = []
        for request, past, new in zip(step.requests, step.past, step.new, strict=True):
            first, length = self._first[request], past + new
            if parts and parts[-1][:2] == (new, length):
                _, _, distance, firsts = parts[-1]
                if distance in (0, first - firsts[-1]) and first > firsts[-1]:
                    parts[-1] = (new, length, first - firsts[-1], [*firsts, first])
                    continue
            parts.append((new, length, 0, [first]))
        return parts

    def _view(self, layer: int, new: int, length: int, distance: int, firsts: list[int]) -> KVView:
        keys, values = (self._shown(array, length, distance, firsts) for array in self._layers[layer])
        return KVView(keys, values, new)

    def _shown(self, array_NKd: Array, length: int, distance: int, firsts: list[int]) -> Array:
        if len(firsts) == 1:
            return array_NKd[None, firsts[0] : firsts[0] + length]
        _, kv_heads, head_dim = array_NKd.shape
        slot = kv_heads * head_dim
        shape, strides = (len(firsts), length, kv_heads, head_dim), (distance * slot, slot, head_dim, 1)
        return mx.as_strided(array_NKd, shape, strides, firsts[0] * slot)


class CachedLayer(NamedTuple):
    """One layer of a KV cache, as attention kernels take it."""

    cache: RequestsKV
    layer: int

    def extended(self, step: KVStep, keys_TKd: Array, values_TKd: Array) -> list[KVView]:
        """Store the new tokens' keys and values; returns all that the step's tokens see, theirs included; no copies."""
        self.cache.append(self.layer, step, keys_TKd, values_TKd)
        return self.cache.views(self.layer, step)


def _slice_or_array(slots: npt.NDArray[np.int64]) -> Array | slice:
    """The slots as a slice if they are consecutive, which takes fewer kernels to write to; otherwise as an array."""
    if np.all(np.diff(slots) == 1):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return mx.array(slots)
