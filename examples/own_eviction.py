"""An eviction rule of one's own, beside three that ship: which page of a full cache makes room for another one?

    python examples/own_eviction.py

The cache holds 34 of Mixtral's 256 experts. Layers take turns, so that the least recently used expert is the one that
is needed soonest: "lru" finds nothing. Rules that count tokens keep the popular experts. Figures are predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from on_demand import OnDemand

import moesched
from moesched.dispatch import LeastFrequentlyUsed, LeastRecentlyUsed, LeastRecentStep, keep_dense
from moesched.seams import Eviction
from moesched.testing import check_eviction


class FadingUse:
    """Evict the page with the lowest use, which fades from step to step; among equals, the one that came first."""

    def __init__(self, fading: float = 0.9) -> None:
        self.fading = fading
        self.seen: dict[int, tuple[int, float]] = {}
        self.step = -1

    def used(self, page: moesched.Page, step: int, tokens: int) -> None:
        self.step = step
        self.seen[page.id] = step, self.use(page) + tokens

    def choose(self, pages: Mapping[int, moesched.Page]) -> moesched.Page:
        return min(pages.values(), key=self.use)

    def use(self, page: moesched.Page) -> float:
        """The tokens that used the page, those of earlier steps counting less."""
        step, use = self.seen.get(page.id, (self.step, 0.0))
        return use * float(self.fading ** (self.step - step))


class Cached(OnDemand):
    """Experts on demand, from a cache with any rule.

    Settings:
        rule: one of `RULES`.
    """

    def __init__(self, rule: str = "lru") -> None:
        super().__init__(slots=34)
        self.rule = rule

    def plan(self, plan: moesched.Plan) -> None:
        plan.place_kv("accelerator")
        keep_dense(plan)
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        rule = RULES[self.rule]()
        self.cache = plan.pool(
            "accelerator", "experts", self.slots * len(plan.layout.expert(0, 0)), experts, rule
        )


RULES: Mapping[str, Callable[[], Eviction]] = {
    "lru": LeastRecentlyUsed,
    "steps": LeastRecentStep,
    "tokens": LeastFrequentlyUsed,
    "fading": FadingUse,
}


def main() -> None:
    """Check the rule, then compare it."""
    check_eviction(FadingUse)
    print("FadingUse names only pages that it was given, and decides alike the second time")
    for rule in RULES:
        report = moesched.simulate_model(
            "mixtral-8x7b",
            machine="t4",
            policy=f"{__file__}:Cached",
            settings={"rule": rule},
            workload=moesched.given_lengths([32], 32),
            routing="zipf",
            routing_settings={"locality": 0.5},
            batch_size=1,
            band=False,
        )
        (pool,) = report.pools
        hits = pool.hits / (pool.hits + pool.misses)
        print(f"{rule:<7} {hits:>5.1%} hits, {report.decode_tokens_per_second:.2f} tokens/s")


if __name__ == "__main__":
    main()
