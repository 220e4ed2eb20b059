"""HybriMoE (Zhong et al. 2025, arXiv 2504.05897): CPU and GPU share each layer; scores decide what is cached.

It has three ideas. The experts of a layer are divided so that both processors and the link end together; the host runs
those with few tokens. Of the next three layers' experts, the one whose arrival would shorten its layer most is
prefetched. The cache evicts the expert with the lowest average router score. The paper divides a layer greedily; here
the division is the best one for the machine's latencies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from moesched.dispatch.eviction import LowestScore
from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import Expert, Routed, tokens_of, users_of
from moesched.dispatch.kv_placement import place_kv_and_dense
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.dispatch.layer_decisions import LayerDecisions
from moesched.dispatch.pooled_experts import PooledExperts
from moesched.dispatch.prefetches import Prefetches
from moesched.dispatch.setting_limits import require_at_least
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class _Gain(NamedTuple):
    """The time that the arrival of an expert would save.

    Attributes:
        now: seconds that the expert's layer takes if the expert does not arrive.
        saved: seconds by which the layer would end earlier if the expert arrived.
    """

    now: float
    saved: float
    expert: Expert


class HybriMoE(LayerByLayer):
    """Divides experts between host and accelerator, prefetches the best ones, evicts by router score.

    A preview runs a later layer's router early, to forecast the layer's experts. A prefetch that is wrong or late saves
    no time, and delays the copies of the layers in between. So the gain of a prefetch is multiplied by the chance that
    it is right and in time, as seen in the run so far. In simulations of Mixtral in which 50 to 80 % of previews are
    right, decode with prefetches is between 0.6 % slower and 5 % faster; if previews are always right, it is up to 15 %
    faster. With small experts, such as those of Qwen3, prefetches save less time than the kernels of the previews take.
    `ahead=0` turns previews and prefetches off.

    Settings:
        experts: number of experts in the cache; by default as many as fit.
        ahead: number of later layers whose routers are previewed, in decode; in prefill all experts are needed anyway.
        buffers: number of slots beside the cache; all but one may hold prefetched experts.
    """

    def __init__(self, experts: int = -1, ahead: int = 3, buffers: int = 4) -> None:
        require_at_least(-1, experts=experts)
        require_at_least(0, ahead=ahead)
        require_at_least(1, buffers=buffers)
        self.most, self.ahead, self.buffers = experts, ahead, buffers

    def plan(self, plan: Plan) -> None:
        plan.request_times()
        plan.request_scores()
        place_kv_and_dense(plan, experts=self.buffers)
        self.cache = PooledExperts(plan, LowestScore(), most=self.most, buffers=self.buffers)
        self.prefetches = Prefetches(self.cache.pool)
        self.routes = [bool(plan.layout.experts_of(i)) for i in plan.layers]
        self.decisions = LayerDecisions(ExpertLatencies(plan), on_host=self.cache.on_host)
        self.page = self.decisions.transfer / len(plan.layout.an_expert)
        self.previewed: defaultdict[int, list[tuple[int, Set[int]]]] = defaultdict(list)
        self.named: Counter[int] = Counter()  # by the number of layers ahead
        self.right: Counter[int] = Counter()
        self.needed = self.in_time = 1

    async def route_and_run(self, step: Step, i: int, micro_batches: Sequence[int]) -> None:
        routing = {j: step.route(i, j) for j in micro_batches}
        misses = step.kind == "decode" and self.cache.pool is not None
        following = step.layers[i + 1 : i + 1 + self.ahead] if misses else ()
        later = [n for n in following if self.routes[n]]
        previews = {n: {j: step.preview_route(n, j) for j in micro_batches} for n in later}
        routed = {j: await handle for j, handle in routing.items()}
        self._compare_previews(i, routed)
        self.run_experts(step, i, routed)
        expected = {n: {j: await each for j, each in of.items()} for n, of in previews.items()}
        for n, of in expected.items():
            self.previewed[n].append((n - i, tokens_of(of).keys()))
        self._prefetch(step, i, expected)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        users = users_of(routed)
        coming = self.prefetches.settle(step, i, routed)
        arrived = [expert for expert in coming if self.cache.arrived(step, (i, expert))]
        self.needed += len(coming)
        self.in_time += len(arrived)
        division = self.decisions.divide(routed, {*self.cache.routed(step, i, routed), *arrived})
        back = self.run_on_host(step, i, division.on_host, users)
        for expert in division.stay:
            self.run_expert(step, i, expert, users[expert])
        for expert in (*sorted(coming.difference(division.fetched)), *division.fetched):
            if expert in division.fetched:
                self.cache.fetch(step, (i, expert))
                self.run_expert(step, i, expert, users[expert])
            self.cache.admit(step, (i, expert))
        self.load_back(step, i, back)
        self.division = division

    def _compare_previews(self, i: int, routed: Routed) -> None:
        """Count the experts that previews of layer `i` named, and those of them that its router chose."""
        chosen = tokens_of(routed).keys()
        for ahead, named in self.previewed.pop(i, ()):
            self.named[ahead] += len(named)
            self.right[ahead] += len(named & chosen)

    def _chance(self, ahead: int) -> float:
        """Return the chance that a prefetch saves time: the share of right previews times that of timely prefetches.

        Args:
            ahead: number of layers from the preview to the previewed layer.
        """
        return (self.right[ahead] + 1) / (self.named[ahead] + 1) * self.in_time / self.needed

    def _prefetch(self, step: Step, i: int, expected: Mapping[int, Routed]) -> None:
        """Prefetch the experts whose arrival shortens the time of their layers most.

        Later layers are assumed to leave the link idle for as long as layer `i` does. On the link, a layer's own copies
        go before prefetches, but a page that is under way is not interrupted. So in each layer during which a prefetch
        is under way, the layer's own fetches, or outputs that come from the host, wait for one page.

        Args:
            expected: the expected routing of each later layer, by layer.
        """
        gains = {n: self._gain(n, routed) for n, routed in expected.items() if tokens_of(routed)}
        chances = {n: self._chance(n - i) for n in gains}
        transfer, division = self.decisions.transfer, self.division
        idle = max(0.0, division.seconds - len(division.fetched) * transfer)
        while gains and len(self.prefetches) < self.buffers - 1:
            arrival = (len(self.prefetches) + 1) * transfer
            late = {n: max(0.0, arrival - (n - i) * idle) for n in gains}
            waits = {n: self._wait(gain.now) for n, gain in gains.items()}
            net = {n: chances[n] * gain.saved - late[n] - waits[n] for n, gain in gains.items()}
            best = max(net, key=net.__getitem__)
            if net[best] <= 0:
                return
            self.prefetches.fetch(step, gains[best].expert)
            gains[best] = self._gain(best, expected[best])

    def _wait(self, later: float) -> float:
        """Return the seconds by which a prefetch delays layers: the time of a page for each layer that runs meanwhile.

        Args:
            later: duration in seconds of the layer for which an expert is prefetched.
        """
        return self.page * max(1.0, self.decisions.transfer / max(self.division.seconds, later))

    def _gain(self, i: int, routed: Routed) -> _Gain:
        """Return the gain if the missing expert with the most tokens in `routed` arrived before layer `i` begins."""
        tokens = tokens_of(routed)
        here = {expert for expert in tokens if (i, expert) in self.cache or (i, expert) in self.prefetches}
        largest = max(tokens.keys() - here or tokens, key=tokens.__getitem__)
        now, then = (self.decisions.divide(routed, each).seconds for each in (here, here | {largest}))
        return _Gain(now, now - then, (i, largest))
