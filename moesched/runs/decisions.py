"""The values of decisions in a simulated run: routed experts, and placeholder tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moesched.requests.beams import Standing
from moesched.routing import SeededRouting
from moesched.routing.router_forecast import RouterForecast
from moesched.routing.scores import ScoredTokens, ScoresExperts, with_shares
from moesched.seams import Routing
from moesched.steps.plan import Plan
from moesched.tasks import Preview, Task


def simulated_decisions(
    plan: Plan, routing: Routing | None = None, previews: RouterForecast | None = None
) -> Callable[[Task], Any]:
    """The function that computes the values of a simulated run's decisions; every sampled token is 0.

    Router scores, where the plan requests them, are the routing's own if it is a `ScoresExperts`. Otherwise, and for
    previews, they are the experts' shares of the micro-batch's choices.

    Args:
        routing: by default uniform, with seed 0.
        previews: forecasts the routing for `Step.preview_route`; by default with `RouterForecast`'s own accuracy.
    """
    config = plan.layout.config
    chosen = routing or SeededRouting(config.routed.experts, config.routed.top_k)
    forecast = previews or RouterForecast(chosen, config.routed.experts)
    batches = plan.batch.micro_batches
    dense = {layer for layer in plan.layers if not plan.layout.experts_of(layer)}
    scored = plan.declared.scores
    scores = chosen.scores if isinstance(chosen, ScoresExperts) else None

    def with_scores(task: Task, tokens: dict[int, int]) -> Mapping[int, int]:
        if scores is None or isinstance(task, Preview):
            return with_shares(tokens, config.routed.experts)
        return ScoredTokens(tokens, scores(task.step, task.layer, task.micro_batch, task.work.tokens))

    def decide(task: Task) -> Any:
        if task.layer in dense:
            return {}
        if task.verb == "route":
            tokens = chosen.choose(task.step, task.layer, task.micro_batch, task.work.tokens)
            return with_scores(task, tokens) if scored else tokens
        if isinstance(task, Preview):
            tokens = forecast.choose(task.step, task.layer, task.micro_batch, task.work.tokens, task.ahead)
            return with_scores(task, tokens) if scored else tokens
        requests = batches[task.micro_batch] if task.step else plan.chunks[task.micro_batch].ends
        if plan.batch.beams > 1:
            return [Standing((0,) * (task.step + 1), 0.0, done=False)] * len(requests)
        return [0] * len(requests)

    return decide
