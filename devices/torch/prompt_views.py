"""Keys and values that the new tokens of prompts attend to, in memory outside the KV cache.

Shapes in names and texts: T new tokens of all sequences, S sequences, L tokens of a sequence, K key-value heads, d head
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

from moesched.models.host_buffers import CACHE_LINE
from moesched.models.kv_blocks import PROMPT_TILE, cached_tokens

from ..kernels.attention_functions import KVView
from ..products.linear import Tensor
from .kv_step import KVStep


def prompt_views(step: KVStep, cached: Iterable[Tensor], new: Iterable[Tensor]) -> list[KVView]:
    """Return the keys and values that a step's new tokens attend to, in the order of the step's sequences.

    Attention to these views has the same bits as with a cache that keeps all tokens. For this, neighbouring sequences
    of equal length are in one view, and zeros stand for tokens before the window.

    Args:
        cached: the keys and the values of a layer before the step, (slots, K, d) each.
        new: the new tokens' keys and values, (T, K, d) each.
    """
    halves = [_joined(step, *each) for each in zip(cached, new, strict=True)]
    queries = (tokens for (tokens, _), _ in _runs(step))
    return list(map(KVView, *halves, queries))


def _runs(step: KVStep) -> Iterator[tuple[tuple[int, int], int]]:
    """Group neighbouring sequences of a step that have equal numbers of new and of earlier tokens.

    Returns:
        for each group, a sequence's numbers of new and of earlier tokens as a pair, and the number of sequences.
    """
    pairs = zip(step.new, step.past, strict=True)
    return ((pair, len([*neighbours])) for pair, neighbours in groupby(pairs))


def _joined(step: KVStep, cached_NKd: Tensor, new_TKd: Tensor) -> Iterator[Tensor]:
    """Yield for each group of `_runs` the keys (or values) that its new tokens attend to: a tensor (S, L, K, d)."""
    start, before = 0, step.before
    for (new, past), sequences in _runs(step):
        stop = start + new * sequences
        own_SNKd = new_TKd[start:stop].view(sequences, new, *new_TKd.shape[1:])
        earlier = list(islice(before, sequences))
        yield own_SNKd if not past and _is_aligned(own_SNKd) else _beside(earlier, past, cached_NKd, own_SNKd)
        start = stop


def _is_aligned(own_SNKd: Tensor) -> bool:
    """Test whether each sequence's keys or values begin at the start of a cache line, as in the KV cache."""
    places = own_SNKd.storage_offset(), *(own_SNKd.stride()[:1] if len(own_SNKd) > 1 else ())
    return all(place * own_SNKd.itemsize % CACHE_LINE == 0 for place in places)


def _beside(earlier: Sequence[Sequence[range]], past: int, cached_NKd: Tensor, own_SNKd: Tensor) -> Tensor:
    """Join the keys (or values) of sequences of equal length: zeros, then cached ones, then new ones.

    Args:
        earlier: for each sequence the slots of its cached tokens.
        past: number of tokens of each sequence before the step, of which a window may keep only some.
        cached_NKd: the layer's keys or values in the cache, by slot.
        own_SNKd: the keys or values of the N new tokens of each sequence.

    Returns:
        a tensor (S, L, K, d).
    """
    sequences, new, *head = own_SNKd.shape
    held = sum(map(len, earlier[0]))
    zeros = (past - held) % PROMPT_TILE
    length = zeros + held + new
    memory = own_SNKd.new_empty(sequences * cached_tokens(length) * own_SNKd[0, 0].numel())
    all_SLKd, _ = carved(memory, (sequences, length, *head))
    if zeros:
        all_SLKd[:, :zeros].zero_()
    for all_LKd, spans in zip(all_SLKd, earlier, strict=True):
        copy_slots(all_LKd[zeros:], cached_NKd, spans)
    all_SLKd[:, zeros + held :].copy_(own_SNKd)
    return all_SLKd


def copy_slots(there_LKd: Tensor, cached_NKd: Tensor, spans: Iterable[range]) -> None:
    """Copy the contents of a cache's slots, one after the other, to the beginning of a sequence's memory.

    Args:
        there_LKd: the sequence's memory, on any device.
        cached_NKd: the layer's keys or values in the cache, by slot.
        spans: ranges of slots.
    """
    start = 0
    for span in spans:
        stop = start + len(span)
        there_LKd[start:stop].copy_(cached_NKd[span.start : span.stop], non_blocking=True)
        start = stop


def carved(memory: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cut a tensor from the start of flat memory; returns the tensor and the remaining memory.

    Each sequence takes as much memory as whole KV cache blocks would, and the tensor shows the first L tokens of it. So
    each begins at a cache line, as in the cache, and attention has the same bits, which depend on this alignment.

    shape: the tensor's shape (S, L, K, d).
    """
    sequences, length, kv_heads, head_dim = shape
    room = cached_tokens(length)
    count = sequences * room * kv_heads * head_dim
    return memory[:count].view(sequences, room, kv_heads, head_dim)[:, :length], memory[count:]
