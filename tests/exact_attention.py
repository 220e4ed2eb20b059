"""Attention as the textbook has it, which kernels are held against."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def exact_attention(
    q_NHd: Tensor,
    keys_LKd: Tensor,
    values_LKd: Tensor,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of the last N of L tokens in float64: (N, H * d).

    A sink is one more score, whose weight is dropped.
    """
    (new, heads, size), length = q_NHd.shape, len(keys_LKd)
    keys, values = (
        each.double().repeat_interleave(heads // each.shape[1], 1) for each in (keys_LKd, values_LKd)
    )
    scores_HNL = torch.einsum("nhd,lhd->hnl", q_NHd.double(), keys) / size**0.5
    distance = torch.arange(length - new, length)[:, None] - torch.arange(length)
    scores_HNL.masked_fill_((distance < 0) | (distance >= (window or length)), -torch.inf)
    if sinks_H is not None:
        scores_HNL = torch.cat([scores_HNL, sinks_H.double()[:, None, None].expand(-1, new, 1)], dim=-1)
    weights_HNL = scores_HNL.softmax(-1)[..., :length]
    return torch.einsum("hnl,lhd->nhd", weights_HNL, values).flatten(1)
