"""The router, the order of rows by expert, and the sum over experts in torch; shapes as in `functions.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from moesched.models.networks import SUM_EPSILON, Activation, FeedForward, Router

from ..products.linear import Blocks, Tensor, linear
from .functions import tiles_of
from .seam import ExpertOrder

ACTIVATED_ROWS = 64
"""Rows of a limited activation that are computed in float32 at a time, to bound the memory."""


def router_logits(x_TD: Tensor, router: Blocks, bias_E: Tensor | None = None) -> Tensor:
    """Compute the router's logits (T tokens, E experts), float32; `bias_E` is added to each token's logits."""
    logits_TE = linear(x_TD.float(), [block.float() for block in router])
    return logits_TE if bias_E is None else logits_TE + bias_E.float()


def router_biases(weights: Mapping[str, Blocks], network: FeedForward) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias (E) of a layer's router logits, and the bias (E) of the scores by which experts are chosen.

    A bias that the router does not have is None; no router has both.
    """
    bias_E = weights["router_bias"][0] if "router_bias" in weights else None
    return (None, bias_E) if network.router.corrected else (bias_E, None)


def scores(logits_TE: Tensor) -> Tensor:
    """Return the probability that the router gives each expert, averaged over the tokens: (E), float32."""
    return logits_TE.softmax(dim=-1).mean(dim=0)


def route(x_TD: Tensor, weights: Mapping[str, Blocks], network: FeedForward) -> tuple[Tensor, Tensor]:
    """Choose each token's k experts by the router, as `choose_experts` does; returns experts and weights, both (T, k).

    x_TD: the router's input.
    """
    added_E, correction_E = router_biases(weights, network)
    return choose_experts(router_logits(x_TD, weights["router"], added_E), network, correction_E)


def choose_experts(
    logits_TE: Tensor, network: FeedForward, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's k experts by logits; returns experts (int64, ascending) and weights (float32), both (T, k).

    bias_E: correction that is added to the scores to choose experts, but not in the weights; None without one.
    """
    router = network.router
    scores_TE = logits_TE if router.score == "softmax" else logits_TE.sigmoid()
    choice_TE = within_groups(scores_TE if bias_E is None else scores_TE + bias_E, router)
    experts_Tk = choice_TE.topk(network.top_k, dim=-1).indices.sort(dim=-1).values
    chosen_Tk = scores_TE.gather(-1, experts_Tk)
    if router.score == "sigmoid":
        if router.normalised:
            chosen_Tk = chosen_Tk / (chosen_Tk.sum(-1, keepdim=True) + SUM_EPSILON)
        return experts_Tk, chosen_Tk * router.scale
    if router.normalised:  # equals the chosen of a softmax over all, divided by their sum
        weights_Tk = chosen_Tk.softmax(dim=-1)
    else:
        weights_Tk = (chosen_Tk - logits_TE.logsumexp(dim=-1, keepdim=True)).exp()
    return experts_Tk, weights_Tk if router.scale == 1 else weights_Tk * router.scale


def within_groups(choice_TE: Tensor, router: Router) -> Tensor:
    """Replace the scores of experts outside of each token's best groups by minus infinity; returns (T, E).

    A group's score is the sum of its two highest scores; the `kept_groups` groups with the highest scores are kept.

    choice_TE: the scores by which experts are chosen.
    """
    if router.kept_groups == router.groups:
        return choice_TE
    choice_TGe = choice_TE.unflatten(-1, (router.groups, -1))
    scores_TG = choice_TGe.topk(2, dim=-1).values.sum(-1)
    kept_Tk = scores_TG.topk(router.kept_groups, dim=-1).indices
    left_out_TG = torch.ones_like(scores_TG, dtype=torch.bool).scatter_(-1, kept_Tk, False)
    kept_TGe: Tensor = choice_TGe.masked_fill(left_out_TG.unsqueeze(-1), -math.inf)
    return kept_TGe.view_as(choice_TE)


def activated(gate_nI: Tensor, up_nI: Tensor, activation: Activation) -> Tensor:
    """Compute the input of an expert's `down` from its products with `gate` and `up`: activation(gate) * up, (n, I).

    An activation with a limit clamps both products, and uses up + 1 instead of up.
    The result overwrites `gate_nI`; `up_nI` may be overwritten, too.
    """
    limit = activation.limit
    if limit is None:
        return F.silu(gate_nI, inplace=True).mul_(up_nI)
    for gate_pI, up_pI in zip(gate_nI.split(ACTIVATED_ROWS), up_nI.split(ACTIVATED_ROWS), strict=True):
        gate, up = gate_pI.float().clamp_(max=limit), up_pI.float().clamp_(-limit, limit)
        gate_pI.copy_(gate.mul_((activation.alpha * gate).sigmoid_()).mul_(up.add_(1)))
    return gate_nI


def sorted_by_expert(experts_Tk: Tensor) -> ExpertOrder:
    """Sort the pairs of token and chosen expert by expert; the pairs of one expert stay in the order of tokens."""
    order_n = experts_Tk.view(-1).argsort(stable=True)
    return ExpertOrder(order_n // max(1, experts_Tk.shape[1]), order_n.argsort().view_as(experts_Tk))


def sum_experts(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """Sum each token's expert outputs, weighted by the router: (T, D), float32.

    Args:
        y_nD: the experts' outputs, a row for each pair of token and expert.
        rows_Tk: the row of each pair in y. A token's outputs are added in ascending order of expert, whatever the order
            in which the experts ran.
    """
    tokens, choices = rows_Tk.shape
    if not choices:
        return torch.zeros(tokens, y_nD.shape[1], device=y_nD.device)
    y_TkD = y_nD.index_select(0, rows_Tk.view(-1)).view(tokens, choices, -1)
    total_TD: Tensor = y_TkD[:, 0] * weights_Tk[:, :1]
    for choice in range(1, choices):
        total_TD.addcmul_(y_TkD[:, choice], weights_Tk[:, choice : choice + 1])
    return total_TD


def combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor) -> Tensor:
    """Add each token's weighted sum of expert outputs, by `sum_experts`, to the residual, rounded once to its dtype."""
    out_TD = torch.empty_like(residual_TD)
    for tile in tiles_of(out_TD):
        out_TD[tile] = sum_experts(y_nD, rows_Tk[tile], weights_Tk[tile]).add_(residual_TD[tile])
    return out_TD
