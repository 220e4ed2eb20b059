"""MoE-Infinity (Xue et al. 2024, arXiv 2401.14361) as a policy outside the package: it learns from earlier batches.

    python examples/moe_infinity.py
    moesched run MODEL --policy examples/moe_infinity.py:MoEInfinity --budget host=9MB --batch-size 1 --prompts FILE

A trace counts, for one batch, the tokens that chose each expert of each layer. Those of earlier batches are kept. As
the present batch goes on, the most similar of them tells which experts the next layer is likely to choose, and which
ones the cache can spare. Figures are predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

import moesched
from moesched.dispatch import (
    CachedLayers,
    Forecast,
    Forecasts,
    PooledExperts,
    Routed,
    keep_dense,
    place_kv_that_fits,
    tokens_of,
)

Trace = list[dict[int, float]]
"""By layer, the tokens that chose each expert."""


class Traces:
    """The trace of the present batch, and those of earlier ones; a predictor and an eviction rule follow them.

    Args:
        most: number of traces to keep; the oldest goes first.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.now: Trace = []
        self.earlier: list[Trace] = []
        self.likely: Trace = []
        """The expected share of each layer's tokens for each expert."""

    def begin(self, layers: int) -> None:
        """Begin a batch."""
        if any(self.now):
            self.earlier = [*self.earlier, self.now][-self.most :]
        self.now = [{} for _ in range(layers)]
        self._match()

    def routed(self, layer: int, routed: Routed) -> None:
        """Count what a layer's router chose."""
        row = self.now[layer]
        for expert, tokens in tokens_of(routed).items():
            row[expert] = row.get(expert, 0.0) + tokens
        if layer == len(self.now) - 1:
            self._match()

    async def forecast(self, step: moesched.Step, layer: int, micro_batches: Sequence[int]) -> Forecast:
        """Expect the experts that the layer chose in this batch and in the most similar one."""
        return dict.fromkeys(micro_batches, self.likely[layer])

    def _match(self) -> None:
        """Find the most similar trace, and add up its shares and those of the present one."""
        known = [self.now]
        if self.earlier:
            known.append(max(self.earlier, key=lambda trace: similarity(trace, self.now)))
        self.likely = [added([shares(trace[layer]) for trace in known]) for layer in range(len(self.now))]


class LeastLikely:
    """Evict the expert that is the least likely to be used in this step; among equals, the least recently used one."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces
        self.last: dict[int, int] = {}
        self.uses = 0

    def used(self, page: moesched.Page, step: int, tokens: int) -> None:
        self.uses += 1
        self.last[page.id] = self.uses

    def choose(self, pages: Mapping[int, moesched.Page]) -> moesched.Page:
        return min(
            pages.values(),
            key=lambda page: (self.traces.likely[page.layer].get(page.expert, 0.0), self.last[page.id]),
        )


class MoEInfinity(CachedLayers):
    """Prefetch and cache experts by the traces of earlier batches.

    Settings:
        experts: number of experts in the cache; by default as many as fit.
        prefetches: experts of the next layer that are prefetched at most.
        traces: number of earlier batches to learn from.
    """

    keeps_state = True

    def __init__(self, experts: int = -1, prefetches: int = 2, traces: int = 32) -> None:
        self.most, self.prefetches_at_most = experts, prefetches
        self.traces = Traces(traces)

    def plan(self, plan: moesched.Plan) -> None:
        self.traces.begin(len(plan.layers))
        place_kv_that_fits(plan, experts=1)
        keep_dense(plan)
        self.forecasts = Forecasts(plan, self.traces)
        self.cache_in(PooledExperts(plan, LeastLikely(self.traces), most=self.most))

    async def route_and_run(self, step: moesched.Step, i: int, micro_batches: Sequence[int]) -> None:
        routed = {j: await step.route(i, j) for j in micro_batches}
        self.forecasts.routed(i, routed)
        self.run_experts(step, i, routed)
        if i + 1 in step.layers and self.cache.pool is not None:
            expected = await self.forecasts.of(step, i + 1, micro_batches)
            for expert in list(expected)[: self.prefetches_at_most]:
                self.prefetches.fetch(step, (i + 1, expert))


class Forgetful(MoEInfinity):
    """The same without the traces of earlier batches."""

    keeps_state = False


def shares(row: Mapping[int, float]) -> dict[int, float]:
    """The share of a layer's tokens for each expert."""
    total = sum(row.values())
    return {expert: tokens / total for expert, tokens in row.items()}


def added(rows: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The sums of several layers' shares."""
    return {
        expert: sum(row.get(expert, 0.0) for row in rows)
        for expert in sorted({expert for row in rows for expert in row})
    }


def similarity(one: Trace, other: Trace) -> float:
    """The cosine of two traces' angle, summed over layers."""
    return sum(cosine(*rows) for rows in zip(one, other, strict=True))


def cosine(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The cosine of two rows' angle; 0 where one is empty."""
    product = sum(tokens * other.get(expert, 0.0) for expert, tokens in one.items())
    lengths = [sqrt(sum(tokens**2 for tokens in row.values())) for row in (one, other)]
    return product / (lengths[0] * lengths[1]) if all(lengths) else 0.0


def main() -> None:
    """Compare the policy with itself without state, over three batches of one request."""
    for policy in (MoEInfinity, Forgetful):
        report = moesched.simulate_model(
            "olmoe-1b-7b",
            machine="t4",
            policy=f"{__file__}:{policy.__name__}",
            settings={"experts": 100},
            workload="mtbench",
            routing="zipf",
            gen=8,
            requests=3,
            batch_size=1,
            band=False,
        )
        [pool], [forecasts] = report.pools, report.forecasts
        print(
            f"{policy.__name__}: {pool.hits / (pool.hits + pool.misses):.1%} of the pages were there, "
            f"{forecasts.accuracy:.1%} of the experts expected, {report.decode_tokens_per_second:.2f} tokens/s"
        )


if __name__ == "__main__":
    main()
