"""Attention with sinks, as in gpt-oss: each head has a learned score, the sink, that belongs to no token.

The softmax over a query's scores includes the sink's score, so the sink takes a share of the weights; it has no value
vector. torch's own attention has no sinks. The idea is from Xiao et al. 2023, arXiv 2309.17453; there, the first tokens
of a sequence serve as sinks instead.
"""

from __future__ import annotations

import torch

from .fused_attention import queries_in_a_piece

Tensor = torch.Tensor


def attend_with_sinks(
    sinks_H: Tensor,
    q_THd: Tensor,
    keys_SLKd: Tensor,
    values_SLKd: Tensor,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Attend causally from the last tokens of S sequences, each over its own keys and values: (T, H * d).

    Args:
        sinks_H: the score of each head's sink.
        q_THd: queries of the new tokens, equally many of each sequence, one sequence after the other.
        window: number of tokens that a query sees, itself included; None for all earlier ones.
        scale: factor on the scores; None for 1 / sqrt(d).
    """
    queries = q_THd.chunk(len(keys_SLKd))
    parts = [
        _attend(sinks_H, *one, window, scale) for one in zip(queries, keys_SLKd, values_SLKd, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    sinks_H: Tensor,
    q_THd: Tensor,
    keys_LKd: Tensor,
    values_LKd: Tensor,
    window: int | None,
    scale: float | None,
) -> Tensor:
    tokens, heads, size = q_THd.shape
    length = len(keys_LKd)
    q_THd = q_THd.float() * (size**-0.5 if scale is None else scale)
    tile, past = queries_in_a_piece(heads, length), length - tokens
    parts = []
    for start in range(0, tokens, tile):
        stop = min(start + tile, tokens)
        first = 0 if window is None else max(0, past + start - window + 1)
        seen = slice(first, past + stop)
        places_T = torch.arange(past + start, past + stop, device=q_THd.device)[:, None]
        places_L = torch.arange(first, past + stop, device=q_THd.device)
        hidden_TL = places_L > places_T
        if window is not None:
            hidden_TL |= places_L <= places_T - window
        parts.append(_tile(sinks_H, q_THd[start:stop], keys_LKd[seen], values_LKd[seen], hidden_TL))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tile(sinks_H: Tensor, q_THd: Tensor, keys_LKd: Tensor, values_LKd: Tensor, hidden_TL: Tensor) -> Tensor:
    """Attend from scaled float32 queries of one sequence to its keys and values, with sinks; returns (T, H * d).

    hidden_TL: True where a query does not see a token.
    """
    tokens, heads, size = q_THd.shape
    kv_heads = keys_LKd.shape[1]
    q_KGTd = q_THd.view(tokens, kv_heads, -1, size).permute(1, 2, 0, 3)
    keys_K1dL = keys_LKd.permute(1, 2, 0).unsqueeze(1).float()
    values_K1Ld = values_LKd.transpose(0, 1).unsqueeze(1).float()
    scores_KGTL = (q_KGTd @ keys_K1dL).masked_fill_(hidden_TL, -torch.inf)
    sinks_KG11 = sinks_H.float().view(kv_heads, -1, 1, 1)
    highest_KGT1 = torch.maximum(scores_KGTL.amax(-1, keepdim=True), sinks_KG11)
    weights_KGTL = scores_KGTL.sub_(highest_KGT1).exp_()
    total_KGT1 = weights_KGTL.sum(-1, keepdim=True) + (sinks_KG11 - highest_KGT1).exp()
    out_KGTd = (weights_KGTL @ values_K1Ld) / total_KGT1
    out_TX: Tensor = out_KGTd.permute(2, 0, 1, 3).reshape(tokens, heads * size)
    return out_TX.to(values_LKd.dtype)
