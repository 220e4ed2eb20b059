"""Twiddler with the makespan minimised: of all ways to run a layer's experts, the one in which the layer ends first.

Algorithm 1 compares two latencies for each expert by itself, as if the others took no time. The link is thus idle while
the CPU has a queue of experts that are each faster there, and the CPU is idle if each is faster moved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import Routed, tokens_of, users_of
from moesched.dispatch.layer_makespan import Layer, LayerDecision, decide
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .twiddler import VISITORS, Twiddler

REMEMBERED = 4096
"""Decisions to cache: with few tokens, layers often pose the same problem."""


class TwiddlerMakespan(Twiddler):
    """Popular experts stay, as in `twiddler`; the processors of the others are decided for a layer as a whole.

    Fetches, kernels and CPU experts overlap, and share the host's memory. A resident expert may also run on the CPU, if
    the host's memory has its weights. Settings are those of `twiddler`.
    """

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        if plan.declared.experts_on_host:
            plan.run_experts_on_host(resident=True)
        self.resident_on_host = plan.declared.resident_experts_on_host
        self.stays = [{expert for layer, expert in self.at_gpu if layer == i} for i in plan.layers]
        self.decided = lru_cache(REMEMBERED)(self._decided)

    def _run_experts(self, step: Step, i: int, routed: Routed) -> None:
        users, stays, size = users_of(routed), self.stays[i], tokens_of(routed).__getitem__
        resident = sorted([expert for expert in users if expert in stays], key=size)
        missing = sorted([expert for expert in users if expert not in stays], key=size, reverse=True)
        choice = self.decided(tuple(map(size, resident)), tuple(map(size, missing)), len(routed))
        fetched = [missing[place] for place in choice.fetched]
        away = [resident[place] for place in choice.away]
        moved = {*fetched, *away}
        left = [expert for expert in missing if expert not in moved]
        back = self._run_on_host(step, i, sorted(left + away, key=size, reverse=True), users)
        for expert in fetched[:VISITORS]:
            self._fetch(step, i, expert)
        for expert in resident:
            if expert not in moved:
                self._run(step, i, expert, users[expert])
        for number, expert in enumerate(fetched, start=VISITORS):
            self._run(step, i, expert, users[expert])
            step.evict(step.expert_pages(i, expert), self.visitors)
            if number < len(fetched):
                self._fetch(step, i, fetched[number])
        for j in back:
            step.load_routed(i, j)

    def _decided(
        self, resident: tuple[int, ...], missing: tuple[int, ...], micro_batches: int
    ) -> LayerDecision:
        """Decide by the tokens of the resident experts, ascending, and of the missing ones, descending."""
        if not self.has_host or not (missing or self.resident_on_host):
            return LayerDecision((), tuple(range(len(missing))), 0.0)
        costs = InParts(self.latencies, micro_batches) if micro_batches > 1 else self.latencies
        return decide(Layer(resident, missing, costs, resident_on_host=self.resident_on_host))

    def _fetch(self, step: Step, i: int, expert: int) -> None:
        """Fetch an expert with less priority than outputs from the host, which are small and end the layer."""
        step.fetch(step.expert_pages(i, expert), self.visitors, source=self.held)


class InParts:
    """Costs of experts whose tokens are split evenly over several micro-batches: one kernel and one copy for each."""

    def __init__(self, latencies: ExpertLatencies, parts: int) -> None:
        self._latencies = latencies
        self._parts = parts
        self.transfer = latencies.transfer

    def at_host(self, tokens: int) -> float:
        return self._of_all(self._latencies.at_host, tokens)

    def at_accelerator(self, tokens: int) -> float:
        return self._of_all(self._latencies.at_accelerator, tokens)

    def to_host(self, tokens: int) -> float:
        return self._of_all(self._latencies.to_host, tokens)

    def from_host(self, rows: int) -> float:
        return self._of_all(self._latencies.from_host, rows)

    def side_by_side(self, tokens: int) -> tuple[float, float]:
        return self._latencies.side_by_side(-(-tokens // self._parts))

    def _of_all(self, latency: Callable[[int], float], tokens: int) -> float:
        parts = max(1, min(self._parts, tokens))
        return parts * latency(-(-tokens // parts))
