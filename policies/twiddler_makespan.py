"""Twiddler with the makespan minimised: of all ways to run a layer's experts, the one with which the layer ends first.

Algorithm 1 compares two latencies for each expert by itself, as if the others took no time. So it leaves the link idle
while the CPU has a queue of experts each of which is faster there, and the CPU idle where each is faster moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from moesched.plan import Plan
from moesched.step import Step

from .layer_makespan import Choice, Layer, decide
from .twiddler import VISITORS, Twiddler

REMEMBERED = 4096
"""So many decisions are remembered: layers are much alike where few tokens choose."""


class TwiddlerMakespan(Twiddler):
    """Popular experts stay, as with `twiddler`; where the others run is decided for a layer as a whole.

    Fetches, kernels and CPU experts overlap, and share the host's memory. An expert that stays may run on the CPU as
    well, where the host's memory has its weights. Settings are those of `twiddler`.
    """

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        plan.run_kept_experts_on_host()
        self.kept_on_host = plan.kept_experts_on_host
        self.stays = [{expert for layer, expert in self.at_gpu if layer == i} for i in plan.layers]
        self.decided = lru_cache(REMEMBERED)(self._decided)

    def _run_experts(self, step: Step, i: int, j: int, inp_size: Mapping[int, int]) -> None:
        size, stays = inp_size.__getitem__, self.stays[i]
        kept = sorted([expert for expert in inp_size if expert in stays], key=size)
        missing = sorted([expert for expert in inp_size if expert not in stays], key=size, reverse=True)
        choice = self.decided(tuple(map(size, kept)), tuple(map(size, missing)))
        fetched = [missing[place] for place in choice.fetched]
        away = [kept[place] for place in choice.away]
        moved = {*fetched, *away}
        left = [expert for expert in missing if expert not in moved]
        on_host = sorted(left + away, key=size, reverse=True)
        if on_host:
            step.offload_routed(i, j)
        for expert in on_host:
            step.run_expert(i, expert, j, at="host")
        for expert in fetched[:VISITORS]:
            self._fetch(step, i, expert)
        for expert in kept:
            if expert not in moved:
                step.run_expert(i, expert, j)
        for number, expert in enumerate(fetched, start=VISITORS):
            step.run_expert(i, expert, j)
            step.evict(step.expert_pages(i, expert), self.visitors)
            if number < len(fetched):
                self._fetch(step, i, fetched[number])
        if on_host:
            step.load_routed(i, j)

    def _decided(self, kept: tuple[int, ...], missing: tuple[int, ...]) -> Choice:
        """By the tokens of those that stay, ascending, and of the others, descending; layers are much alike."""
        if not self.has_host or not (missing or self.kept_on_host):
            return Choice((), tuple(range(len(missing))), 0.0)
        return decide(Layer(kept, missing, self.latencies, kept_on_host=self.kept_on_host))

    def _fetch(self, step: Step, i: int, expert: int) -> None:
        """Behind outputs that come back from the host, which are small and end the layer."""
        step.fetch(step.expert_pages(i, expert), self.visitors, source=self.held)
