"""Places experts in the accelerator's memory: ranks all experts, and keeps the first that fit.

This is section 3.4 of the Twiddler paper. Dense weights, which every token needs, are always kept. A popularity is a
table [layers][experts] of the number of tokens that chose each expert.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from moesched.errors import BadInput
from moesched.models.layout import Page
from moesched.routing.profile import read_routing_profile
from moesched.steps.fixed_pages import FixedPages
from moesched.steps.plan import Plan

Expert = tuple[int, int]
"""An expert, by its layer and its index in that layer."""
Popularity = Sequence[Sequence[float]]
Routed = Mapping[int, Mapping[int, int]]
"""By micro-batch and expert: the number of the micro-batch's tokens that chose the expert."""
Strategy = Literal["popular", "worst", "random", "front", "balanced"]


def order_of(strategy: str, popularity: Popularity, seed: int = 0) -> list[Expert]:
    """Rank all experts: those to keep come first. Equally popular experts are spread evenly over the layers.

    Args:
        strategy: "popular" puts the most popular experts first; "worst" the least popular ones; "random" shuffles them
            by `seed`; "front" puts the first layer's experts first, then the second layer's, and so on; "balanced"
            takes the most popular expert of every layer, then the second of every layer, and so on.
        popularity: by layer and expert, the number of tokens that chose the expert; empty for layers without experts.

    Raises:
        BadInput: there is no such strategy.
    """
    ranked = [_ranked(row) for row in popularity]
    most = max(map(len, ranked))
    balanced = [(i, row[rank]) for rank in range(most) for i, row in enumerate(ranked) if rank < len(row)]
    if strategy == "balanced":
        return balanced
    if strategy == "popular":
        return sorted(balanced, key=lambda each: -popularity[each[0]][each[1]])
    if strategy == "worst":
        return sorted(balanced, key=lambda each: popularity[each[0]][each[1]])
    if strategy == "front":
        return sorted(balanced, key=lambda each: each[0])
    if strategy == "random":
        return random.Random(seed).sample(balanced, len(balanced))
    raise BadInput(f"placement is {strategy!r}: give one of {', '.join(get_args(Strategy))}")


def popularity_of(plan: Plan, path: str = "") -> Popularity:
    """Read the popularity of all experts, by layer and expert, from a file with a routing profile.

    path: the file; "" makes all experts equally popular.

    Raises:
        BadInput: the file cannot be read, is not a profile, or belongs to another model.
    """
    layout = plan.layout
    if not path:
        return [[1.0] * len(layout.experts_of(i)) for i in plan.layers]
    return [
        row if layout.experts_of(i) else []
        for i, row in enumerate(read_routing_profile(path, layout.config).counts)
    ]


def keep_dense(plan: Plan) -> None:
    """Keep all dense weights, which every token needs, on the accelerator."""
    plan.keep([page for i in plan.layers for page in plan.layout.dense(i)])


def keep_experts(plan: Plan, order: Iterable[Expert], most: int | None = None) -> frozenset[Expert]:
    """Keep the first experts of `order` on the accelerator, as many as fit; return those kept.

    Args:
        order: experts, each as (layer, number).
        most: the largest number of experts to keep; None for no limit.
    """
    left = plan.free("accelerator")
    resident: list[Expert] = []
    pages: list[Page] = []
    for expert in order:
        mine = plan.layout.expert(*expert)
        left -= sum(map(plan.slot_bytes, mine))
        if left < 0 or (most is not None and len(resident) >= most):
            break
        resident.append(expert)
        pages += mine
    plan.keep(pages)
    return frozenset(resident)


def leave_on_host(plan: Plan, resident: frozenset[Expert] = frozenset()) -> FixedPages | None:
    """Keep in host memory all experts that are not in `resident`.

    Returns:
        The pages kept in host memory; None if all weights are in host memory anyway.
    """
    if plan.machine.weights_on_host and not plan.machine.unified:
        return None
    pages = plan.layout.pages
    return plan.keep(
        [page for page in pages if page.expert >= 0 and (page.layer, page.expert) not in resident], "host"
    )


def users_of(routed: Routed) -> Mapping[int, Sequence[int]]:
    """Map each chosen expert, in ascending order, to the micro-batches that chose the expert.

    routed: for each micro-batch, the number of its tokens that chose each expert.
    """
    if len(routed) == 1:
        [(only, chosen)] = routed.items()
        return dict.fromkeys(sorted(chosen), (only,))
    users: dict[int, list[int]] = {}
    for j, chosen in routed.items():
        for expert in chosen:
            users.setdefault(expert, []).append(j)
    return {expert: users[expert] for expert in sorted(users)}


def tokens_of(routed: Routed) -> Mapping[int, int]:
    """Map each chosen expert to the number of tokens of all micro-batches that chose the expert.

    routed: for each micro-batch, the number of its tokens that chose each expert.
    """
    if len(routed) == 1:
        return next(iter(routed.values()))
    tokens: dict[int, int] = {}
    for chosen in routed.values():
        for expert, more in chosen.items():
            tokens[expert] = tokens.get(expert, 0) + more
    return tokens


def seconds_of(latency: Callable[[int], float], routed: Routed, experts: Iterable[int]) -> dict[int, float]:
    """Map each expert to the seconds that its tokens take, if each micro-batch's tokens run on their own.

    Args:
        latency: function from a number of tokens to seconds.
        routed: for each micro-batch, the number of its tokens that chose each expert.
        experts: the experts to compute the seconds of.
    """
    if len(routed) == 1:
        [chosen] = routed.values()
        return {expert: latency(chosen[expert]) for expert in experts}
    return {
        expert: sum(latency(chosen[expert]) for chosen in routed.values() if expert in chosen)
        for expert in experts
    }


def _ranked(row: Sequence[float]) -> list[int]:
    """Return a layer's experts, the most popular first.

    row: number of tokens that chose each expert.
    """
    return sorted(range(len(row)), key=lambda expert: -row[expert])
