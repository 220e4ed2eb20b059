"""Causal attention of new tokens over cached keys and values in torch; shapes as in `functions.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moesched.models.footprint import QUERY_TILE

from ..products.linear import Tensor
from .fused_attention import queries_in_a_piece
from .sinks import attend_with_sinks


class KVView(NamedTuple):
    """The cached keys and values of S sequences of one length L; the last tokens of each sequence are new.

    Attributes:
        keys_SLKd, values_SLKd: (S sequences, L tokens, K key-value heads, d head size), with any strides.
        queries: number of new tokens of each sequence.
    """

    keys_SLKd: Tensor
    values_SLKd: Tensor
    queries: int


def attention(
    q_THd: Tensor,
    views: Sequence[KVView],
    window: int | None = None,
    *,
    fused: bool = True,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend from T new tokens, each over the earlier tokens of its own sequence and itself; returns (T, H * d).

    Args:
        q_THd: queries of the new tokens: view by view, and within a view sequence by sequence.
        views: the keys and values of all sequences, in groups of sequences of one length.
        window: number of tokens that a query sees, itself included; None for itself and all earlier tokens.
        fused: True if torch has a kernel for this device that stores no scores. If False, queries are computed in
            pieces, so that their scores take little memory.
        sinks_H: the score of each head's attention sink, as in `sinks.py`; None without sinks.
        scale: factor on the scores; None for 1 / sqrt(d).

    The last bits of float32 depend on strides, on the alignment of queries and keys to cache lines, and on the number
    of cores: keep these the same to get the same bits.
    """
    parts = []
    start = 0
    for keys_SLKd, values_SLKd, queries in views:
        stop = start + keys_SLKd.shape[0] * queries
        many = partial(_attend_many_queries, fused=fused)
        attend = _attend_one_query if queries == 1 else many
        if sinks_H is not None:
            attend = partial(attend_with_sinks, sinks_H)
        parts.append(attend(q_THd[start:stop], keys_SLKd, values_SLKd, window, scale))
        start = stop
    return beside(parts)


def beside(parts: list[Tensor]) -> Tensor:
    """Return one tensor with the rows (n, X) of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    rows_TX = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    torch._foreach_copy_(rows_TX.split([len(part) for part in parts]), parts)
    return rows_TX


def _attend_one_query(
    q_SHd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, window: int | None, scale: float | None
) -> Tensor:
    # Heads that share keys act as queries of one head: no key is read twice, and no mask is needed.
    if window is not None:
        keys_SLKd, values_SLKd = keys_SLKd[:, -window:], values_SLKd[:, -window:]
    sequences, _, kv_heads, head_dim = keys_SLKd.shape
    q_SKGd = q_SHd.view(sequences, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(
        q_SKGd, keys_SLKd.transpose(1, 2), values_SLKd.transpose(1, 2), scale=scale
    )
    return out.reshape(sequences, -1)


def _attend_many_queries(
    q_THd: Tensor,
    keys_SLKd: Tensor,
    values_SLKd: Tensor,
    window: int | None,
    scale: float | None,
    *,
    fused: bool,
) -> Tensor:
    queries = q_THd.chunk(keys_SLKd.shape[0])
    parts = [
        _attend_sequence(*one, window, scale, fused)
        for one in zip(queries, keys_SLKd, values_SLKd, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_sequence(
    q_THd: Tensor,
    keys_LKd: Tensor,
    values_LKd: Tensor,
    window: int | None,
    scale: float | None,
    fused: bool,
) -> Tensor:
    tokens, heads, head_dim = q_THd.shape
    length, kv_heads, _ = keys_LKd.shape
    shared = heads // kv_heads
    q_KGTd = q_THd.view(tokens, kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    keys = keys_LKd.transpose(0, 1)[:, None].expand(-1, shared, -1, -1)
    values = values_LKd.transpose(0, 1)[:, None].expand(-1, shared, -1, -1)
    if not fused:
        tile = queries_in_a_piece(shared, length)
        each = zip(q_KGTd.split(1), keys.split(1), values.split(1), strict=True)
        out_KGTd = torch.cat([_attend_tiles(*one, window, scale, tile) for one in each])
    elif tokens == length and (window is None or window >= length):
        out_KGTd = F.scaled_dot_product_attention(q_KGTd, keys, values, is_causal=True, scale=scale)
    else:
        out_KGTd = _attend_tiles(q_KGTd, keys, values, window, scale)
    return out_KGTd.permute(2, 0, 1, 3).reshape(tokens, -1)


def _attend_tiles(
    q_KGTd: Tensor,
    keys_KGLd: Tensor,
    values_KGLd: Tensor,
    window: int | None,
    scale: float | None,
    tile: int = QUERY_TILE,
) -> Tensor:
    tokens, length = q_KGTd.shape[2], keys_KGLd.shape[2]
    past = length - tokens
    tiles = []
    for start in range(0, tokens, tile):
        stop = min(start + tile, tokens)
        first = 0 if window is None else max(0, past + start - window + 1)
        mask = _mask(past + start, past + stop, first, window, q_KGTd.device)
        seen = slice(first, past + stop)
        q, keys, values = q_KGTd[:, :, start:stop], keys_KGLd[:, :, seen], values_KGLd[:, :, seen]
        tiles.append(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale))
    return torch.cat(tiles, dim=2)


def _mask(start: int, stop: int, first_key: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask (queries start .. stop-1, keys first_key .. stop-1) on a device: True where a query sees a key.

    window: number of tokens that a query sees, itself included; None for itself and all earlier tokens.
    """
    query = torch.arange(start, stop, device=device)[:, None]
    key = torch.arange(first_key, stop, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
