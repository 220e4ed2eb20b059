"""Makes the values that no device computes in a simulated run: routed experts, and placeholder tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from moesched.inputs.defaults import PREVIEW_ACCURACY
from moesched.requests.beams import Standing
from moesched.routing import SeededRouting
from moesched.routing.router_forecast import RouterForecast
from moesched.routing.scores import ScoredTokens, ScoresExperts, with_shares
from moesched.seams import Routing
from moesched.steps.plan import Plan
from moesched.steps.works import RowsOfExperts
from moesched.tasks import Preview, Task


def simulated_decisions(
    plan: Plan,
    routing: Routing | None = None,
    preview_accuracy: float = PREVIEW_ACCURACY,
    tokens: Sequence[Sequence[int]] = (),
    *,
    by_step: bool = False,
) -> Callable[[Task], Any]:
    """Return a function from which the virtual driver gets the value of a routing or sampling task.

    The value of `route` and `preview_route` is {expert: tokens}, the value of `sample` a list of tokens. If the plan
    requests router scores, those of `route` come from `routing` if that is a `ScoresExperts`. All other scores, such as
    those of previews, are each expert's share of the micro-batch's choices.

    Args:
        routing: the experts that tokens choose; by default uniform, with seed 0.
        preview_accuracy: probability (0 to 1) that `Step.preview_route` forecasts an expert which the routing chooses
            in the next layer; n layers ahead, it is this number to the power of n.
        tokens: tokens that each request generates, such as those of a real run; after them, and by default, zeros.
        by_step: whether `Routing.choose` gets the number of the run's step as its argument `step`; otherwise it gets
            the number of tokens that each sequence of the task's micro-batch had generated.
    """
    config = plan.layout.config
    moment = _moment(by_step=by_step)
    chosen = routing or SeededRouting(config.routed.experts, config.routed.top_k)
    forecast = RouterForecast(chosen, config.routed.experts, preview_accuracy)
    dense = {layer for layer in plan.layers if not plan.layout.experts_of(layer)}
    scored = plan.declared.scores
    scores = chosen.scores if isinstance(chosen, ScoresExperts) else None

    def with_scores(task: Task, counts: dict[int, int]) -> Mapping[int, int]:
        if scores is None or isinstance(task, Preview):
            return with_shares(counts, config.routed.experts)
        return ScoredTokens(counts, scores(moment(task), task.layer, task.micro_batch, task.work.tokens))

    def decide(task: Task) -> Any:
        if task.layer in dense:
            return ScoredTokens({}, ()) if scored else {}
        if task.verb == "route":
            counts = chosen.choose(moment(task), task.layer, task.micro_batch, task.work.tokens)
            return with_scores(task, counts) if scored else counts
        if isinstance(task, Preview):
            rows, ahead = task.work.tokens, task.ahead
            counts = forecast.choose(moment(task), task.layer, task.micro_batch, rows, ahead)
            return with_scores(task, counts) if scored else counts
        if plan.batch.beams > 1:
            return [Standing((0,) * (task.generated + 1), 0.0, done=False)] * len(task.operands)
        if not tokens:
            return [0] * len(task.operands)
        return [_token(tokens[request], task.generated) for request in task.operands]

    return decide


def rows_of_experts(routing: Routing | None, *, by_step: bool = False) -> RowsOfExperts | None:
    """Return a function that takes a task, and returns how many of the task's tokens each chosen expert gets.

    Return None if tokens choose experts uniformly; a task is then priced at the mean cost for its number of tokens.

    For the arguments, see `simulated_decisions`.
    """
    if routing is None or isinstance(routing, SeededRouting):
        return None
    moment = _moment(by_step=by_step)

    def chosen(task: Task) -> tuple[int, ...]:
        return tuple(routing.choose(moment(task), task.layer, task.micro_batch, task.work.tokens).values())

    return chosen


def _moment(*, by_step: bool) -> Callable[[Task], int]:
    """Return a function from a task to the number that `Routing.choose` gets as `step`: see `simulated_decisions`."""
    return attrgetter("step" if by_step else "generated")


def _token(tokens: Sequence[int], place: int) -> int:
    return tokens[place] if place < len(tokens) else 0
