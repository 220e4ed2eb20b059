"""The values of decisions in a simulated run: routed experts, and placeholder tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesched.requests.beams import Standing
from moesched.routing import SeededRouting
from moesched.routing.router_forecast import RouterForecast
from moesched.seams import Routing
from moesched.steps.plan import Plan
from moesched.tasks import Task


def simulated_decisions(
    plan: Plan, routing: Routing | None = None, previews: RouterForecast | None = None
) -> Callable[[Task], Any]:
    """The function that computes the values of a simulated run's decisions; every sampled token is 0.

    Args:
        routing: by default uniform, with seed 0.
        previews: forecasts the routing for `Step.preview_route`; by default with `RouterForecast`'s own accuracy.
    """
    config = plan.layout.config
    chosen = routing or SeededRouting(config.experts, config.top_k)
    forecast = previews or RouterForecast(chosen, config.experts)
    batches = plan.batch.micro_batches

    def decide(task: Task) -> Any:
        if task.verb == "route":
            return chosen.choose(task.step, task.layer, task.micro_batch, task.work.tokens)
        if task.verb == "preview_route":
            return forecast.choose(task.step, task.layer, task.micro_batch, task.work.tokens)
        requests = batches[task.micro_batch] if task.step else plan.chunks[task.micro_batch].ends
        if plan.batch.beams > 1:
            return [Standing((0,) * (task.step + 1), 0.0, done=False)] * len(requests)
        return [0] * len(requests)

    return decide
