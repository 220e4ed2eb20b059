"""One cache of experts for all layers; missing experts are fetched or run on the CPU.

Layers with few popular experts then take less of the room than other layers. Plain LRU suits a common cache badly:
layers take turns, so the least recently used experts belong to the layer whose turn is next. Here recency counts in
whole steps (`LeastRecentStep`). Of the experts last used in the same step, the one with the fewest tokens so far is
evicted. vLLM's expert cache (pull request 37190, "LFRU") weighs frequency against age in one number, for the same
reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesched.dispatch.eviction import LeastRecentStep
from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import (
    Routed,
    order_of,
    popularity_of,
    seconds_of,
    tokens_of,
    users_of,
)
from moesched.dispatch.kv_placement import place_kv_and_dense
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.dispatch.pooled_experts import PooledExperts
from moesched.dispatch.setting_limits import require_at_least
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class ExpertCache(LayerByLayer):
    """Runs cached experts on the accelerator, and divides missing ones between accelerator and host.

    Missing experts with the fewest tokens run on the host, and the others are fetched into the cache. The number of
    experts on the host is chosen to minimise the time that the layer takes, by the latencies of the machine's cost
    model. If the host does not have the weights, all missing experts are fetched.

    `LayerDecisions` in moesched.dispatch considers more divisions. In simulations of Mixtral and Qwen3, it made decode
    steps at most 2.6 % shorter, but computing a division took longer. It may also fetch experts with few tokens: they
    save the host as much time as experts with more tokens, and take less time on the accelerator. With several
    micro-batches it ranks experts by the time of their kernels, since each micro-batch has a kernel of its own. It also
    includes the time to copy rows between host and accelerator.

    Settings:
        experts: number of experts in the cache; by default as many as fit.
        popularity: a CSV file of each expert's count (layer, expert, count), to choose the first experts in the cache.
        buffers: number of slots beside the cache, for experts that arrive before another is evicted.
    """

    def __init__(self, experts: int = -1, popularity: str = "", buffers: int = 2) -> None:
        require_at_least(-1, experts=experts)
        require_at_least(1, buffers=buffers)
        self.most = experts
        self.popularity = popularity
        self.buffers = buffers

    def plan(self, plan: Plan) -> None:
        place_kv_and_dense(plan, experts=self.buffers)
        order = order_of("popular", popularity_of(plan, self.popularity))
        self.latencies = ExpertLatencies(plan)
        self.cache = PooledExperts(plan, LeastRecentStep(), order, most=self.most, buffers=self.buffers)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        chosen, users = tokens_of(routed), users_of(routed)
        hits = self.cache.routed(step, i, routed)
        missing = sorted(chosen.keys() - hits)
        missing.sort(key=chosen.__getitem__, reverse=True)
        count = self._fetches(hits, missing, routed)
        fetched, on_host = missing[:count], sorted(missing[count:])
        back = self.run_on_host(step, i, on_host, users)
        for expert in hits:
            self.run_expert(step, i, expert, users[expert])
        for expert in fetched:
            self.cache.fetch(step, (i, expert))
            self.run_expert(step, i, expert, users[expert])
            self.cache.admit(step, (i, expert))
        self.load_back(step, i, back)

    def _fetches(self, hits: Iterable[int], misses: Sequence[int], routed: Routed) -> int:
        """Return the number of missing experts to fetch, those with the most tokens first; the others run on the host.

        A fetch takes equally long for any number of tokens, so it pays most for the experts with the most tokens.

        Args:
            hits: chosen experts that are in the cache.
            misses: chosen experts that are not in the cache.
        """
        if not self.cache.on_host:
            return len(misses)
        at_host = seconds_of(self.latencies.at_host, routed, misses)
        at_accelerator = seconds_of(self.latencies.at_accelerator, routed, misses)
        here = sum(seconds_of(self.latencies.at_accelerator, routed, hits).values())
        host = sum(at_host.values())
        best, end, link, transfer = 0, max(here, host), 0.0, self.latencies.transfer
        for count, expert in enumerate(misses, 1):
            link += transfer
            here = max(here, link) + at_accelerator[expert]
            if here > end:
                break
            host -= at_host[expert]
            if host <= end:
                best, end = count, max(here, host)
        return best
