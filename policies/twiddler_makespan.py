"""Twiddler with the makespan minimised: of all ways to run a layer's experts, the one with which the layer ends first.

Algorithm 1 compares two latencies for each expert by itself, as if the others took no time. So it leaves the link idle
while the CPU has a queue of experts each of which is faster there, and the CPU idle where each is faster moved.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesched.plan import Plan
from moesched.step import Step

from .layer_makespan import Choice, Layer, decide
from .twiddler import VISITORS, Twiddler


class TwiddlerMakespan(Twiddler):
    """Popular experts stay, as with `twiddler`; where the others run is decided for a layer as a whole.

    Fetches, kernels and CPU experts overlap, and share the host's memory. An expert that stays may run on the CPU as
    well, where the host's memory has its weights. Settings are those of `twiddler`.
    """

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        plan.run_kept_experts_on_host()
        self.kept_on_host = plan.kept_experts_on_host
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], Choice] = {}

    def _run_experts(self, step: Step, i: int, j: int, inp_size: Mapping[int, int]) -> None:
        size = inp_size.__getitem__
        kept = sorted((e for e in inp_size if (i, e) in self.at_gpu), key=size)
        missing = sorted((e for e in inp_size if (i, e) not in self.at_gpu), key=size, reverse=True)
        choice = self._choose(tuple(map(size, kept)), tuple(map(size, missing)))
        fetched = [missing[place] for place in choice.fetched]
        away = [kept[place] for place in choice.away]
        on_host = sorted([e for e in missing if e not in fetched] + away, key=size, reverse=True)
        if on_host:
            step.offload_routed(i, j)
        for expert in on_host:
            step.run_expert(i, expert, j, at="host")
        for expert in fetched[:VISITORS]:
            self._fetch(step, i, expert)
        for expert in kept:
            if expert not in away:
                step.run_expert(i, expert, j)
        for number, expert in enumerate(fetched, start=VISITORS):
            step.run_expert(i, expert, j)
            step.evict(step.expert_pages(i, expert), self.visitors)
            if number < len(fetched):
                self._fetch(step, i, fetched[number])
        if on_host:
            step.load_routed(i, j)

    def _choose(self, kept: tuple[int, ...], missing: tuple[int, ...]) -> Choice:
        """By the tokens of those that stay, ascending, and of the others, descending; layers are much alike."""
        if not self.has_host or not (missing or self.kept_on_host):
            return Choice((), tuple(range(len(missing))), 0.0)
        choice = self.known.get((kept, missing))
        if choice is None:
            layer = Layer(kept, missing, self.latencies, kept_on_host=self.kept_on_host)
            choice = self.known[kept, missing] = decide(layer)
        return choice

    def _fetch(self, step: Step, i: int, expert: int) -> None:
        """Behind outputs that come back from the host, which are small and end the layer."""
        step.fetch(step.expert_pages(i, expert), self.visitors, source=self.held)
