"""The KV cache on MLX: two arrays for each layer, in which every request has contiguous slots.

Shapes in names: N slots, T new tokens, L tokens that attention reads, K key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from moesched.models.config import ModelConfig
from moesched.models.kv_blocks import cached_tokens, kept_tokens

from ..kernels.mlx_functions import Array, KVView
from .slots import ContiguousSlots


class KVStep(NamedTuple):
    """The new tokens of some requests in one step, and their slots in the cache.

    Attributes:
        requests: the requests' numbers; the tuples below have an entry for each request, in this order.
        past: number of tokens that the request had before the step.
        new: number of tokens that the step adds.
        before: position, within the request, of the token in the request's first slot when the step begins.
        starts: position of the token in that slot when the step ends. It is above `before` if the step drops tokens
            that left the window.
        in_place: True if attention can read the cache after the new tokens are stored; False if storing them overwrites
            tokens that other new tokens attend to.
        positions: position in its request of each new token, int64.
        slots_T: slots of the new tokens in the cache; a slice if they are consecutive.
        last: index of each request's last token among all T new tokens.
        one_each: whether each request has one new token.
    """

    requests: tuple[int, ...]
    past: tuple[int, ...]
    new: tuple[int, ...]
    before: tuple[int, ...]
    starts: tuple[int, ...]
    in_place: bool
    positions: npt.NDArray[np.int64]
    slots_T: Array | slice
    last: tuple[int, ...]
    one_each: bool


class RequestsKV:
    """A KV cache of layers that have the same attention window.

    Each layer has two arrays (slots, key-value heads, head size), for keys and for values. Each request has a
    contiguous range of slots: one for each token of its final length, or as many as a window takes. Once the range is
    full, the tokens that are still in the window are moved to the range's first slots.

    Args:
        layers: numbers of the layers.
        slots: number of slots of all requests that are open at the same time.

    Attributes:
        layers: numbers of the cache's layers.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[int], slots: int, dtype: mx.Dtype) -> None:
        self.layers = tuple(layers)
        attention = config.layer(layers[0]).grouped
        self._window = attention.window
        self._most_cached = attention.most_cached
        self._slots = ContiguousSlots(slots)
        self._length: dict[int, int] = {}
        self._start: dict[int, int] = {}
        shape = slots, attention.kv_heads, attention.head_dim
        self._layers = {layer: [mx.zeros(shape, dtype=dtype) for _ in "kv"] for layer in layers}
        mx.eval(self._layers)

    def open(self, request: int, tokens: int) -> None:
        """Begin a request of up to `tokens` tokens.

        Other requests may be moved to other slots to make room. So do not call this while a step is under way, that is
        after `extend`, and before the step's keys and values are stored in all layers.

        Raises:
            OutOfSlots: there are not enough free slots; nothing has changed.
        """
        moved = self._slots.open(request, kept_tokens(cached_tokens(tokens), self._most_cached))
        for other, before, after in moved:
            held = self._length[other] - self._start[other]
            for array_NKd in self._arrays if held else ():
                array_NKd[after : after + held] = array_NKd[before : before + held]
        self._length[request] = self._start[request] = 0

    def close(self, request: int) -> None:
        """End a request, and free its slots."""
        self._slots.close(request)
        del self._length[request], self._start[request]

    def extend(self, requests: Sequence[int], new: Sequence[int]) -> KVStep:
        """Make room for new[i] more tokens of requests[i]; returns a step with the new tokens and their slots."""
        past = tuple(self._length[request] for request in requests)
        before = tuple(self._start[request] for request in requests)
        lengths = list(map(add, past, new))
        is_full = [
            length - self._start[request] > len(self._slots[request])
            for request, length in zip(requests, lengths, strict=True)
        ]
        in_place = max(new) == 1 or not any(is_full)
        for request, length, full in zip(requests, lengths, is_full, strict=True):
            if self._window is not None and (full or not in_place):
                self._start[request] = max(0, length - self._window)
            self._length[request] = length
        starts = tuple(self._start[request] for request in requests)
        spans = [np.arange(first, length) for first, length in zip(past, lengths, strict=True)]
        slots = [
            self._slots[request].start + span - start
            for request, span, start in zip(requests, spans, starts, strict=True)
        ]
        last = tuple(int(end) - 1 for end in np.cumsum(new))
        slots_T = _slice_or_array(np.concatenate(slots))
        positions = np.concatenate(spans)
        sizes = tuple(requests), past, tuple(new), before, starts
        return KVStep(*sizes, in_place, positions, slots_T, last, max(new) == 1)

    def at(self, layer: int) -> CachedLayer:
        """Return one layer of the cache, in the form that attention kernels take."""
        return CachedLayer(self, layer)

    def extended(self, layer: int, step: KVStep, keys_TKd: Array, values_TKd: Array) -> list[KVView]:
        """Store the keys and values of a step's new tokens in one layer.

        Returns:
            views of all keys and values that the new tokens attend to, in the order of the requests.
        """
        halves = list(zip(self._layers[layer], (keys_TKd, values_TKd), strict=True))
        if not step.in_place:
            joined = (self._joined(array, step, fresh_TKd) for array, fresh_TKd in halves)
            return [KVView(*each) for each in zip(*joined, step.new, strict=True)]
        for array, fresh_TKd in halves:
            self._move(array, step)
            array[step.slots_T] = fresh_TKd
        return [self._view(layer, *part) for part in self._parts(step)]

    def arrays(self, layer: int) -> list[Array]:
        """Return one layer's array of keys and its array of values.

        MLX computes lazily: after a call of `extended`, evaluate both arrays to store the new tokens.
        """
        return self._layers[layer]

    @property
    def _arrays(self) -> list[Array]:
        """The arrays of keys and values of all layers, in one list."""
        return [array for halves in self._layers.values() for array in halves]

    def _move(self, array_NKd: Array, step: KVStep) -> None:
        """Make room in full ranges of slots: move the tokens that are still in the window to the range's first slots.

        Args:
            array_NKd: the keys or the values of a layer, by slot.
            step: the step that the room is for.
        """
        for request, past, before, start in zip(
            step.requests, step.past, step.before, step.starts, strict=True
        ):
            if start > before:
                first = self._slots[request].start
                array_NKd[first : first + past - start] = array_NKd[
                    first + start - before : first + past - before
                ]

    def _joined(self, array_NKd: Array, step: KVStep, fresh_TKd: Array) -> list[Array]:
        """Join for each request the cached and the new keys (or values) that the request's new tokens attend to.

        The keys (or values) from position `step.starts` of the request on are then written to the request's slots.

        Args:
            array_NKd: the keys or the values of a layer, by slot; some of them are overwritten.
            fresh_TKd: the new tokens' keys or values.

        Returns:
            an array (1, tokens, key-value heads, head size) for each request.
        """
        assert self._window is not None, "all tokens have room without one"
        joined, stop = [], 0
        for request, past, new, before, start in zip(
            step.requests, step.past, step.new, step.before, step.starts, strict=True
        ):
            first, stop = self._slots[request].start, stop + new
            seen = max(before, past - self._window + 1)
            cached = array_NKd[first + seen - before : first + past - before]
            all_LKd = mx.concatenate([cached, fresh_TKd[stop - new : stop]])
            kept = past + new - start
            array_NKd[first : first + kept] = all_LKd[-kept:]
            joined.append(all_LKd[None])
        return joined

    def _parts(self, step: KVStep) -> list[tuple[int, int, int, list[int]]]:
        """Group neighbouring requests of a step that have equal lengths and evenly spaced slots: one view per group.

        Returns:
            for each group: the number of new tokens of each request, the number of tokens of each request in the cache,
                the distance in slots from one request to the next, and the first slot of each request.
        """
        parts: list[tuple[int, int, int, list[int]]] = []
        for request, past, new, start in zip(step.requests, step.past, step.new, step.starts, strict=True):
            first, length = self._slots[request].start, past + new - start
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
    """One layer of a KV cache, in the form that attention kernels take.

    Attributes:
        layer: number of the layer.
    """

    cache: RequestsKV
    layer: int

    def extended(self, step: KVStep, keys_TKd: Array, values_TKd: Array) -> list[KVView]:
        """Store a step's new keys and values; returns views of all keys and values that the new tokens attend to."""
        return self.cache.extended(self.layer, step, keys_TKd, values_TKd)

    @property
    def arrays(self) -> list[Array]:
        """The layer's array of keys and its array of values, which have to be evaluated after `extended`."""
        return self.cache.arrays(self.layer)


def _slice_or_array(slots: npt.NDArray[np.int64]) -> Array | slice:
    """Convert slots to a slice if they are consecutive, else to an array; a write to a slice takes fewer kernels."""
    if np.all(np.diff(slots) == 1):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return mx.array(slots)
