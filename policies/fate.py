"""Fate (Fang et al. 2025, arXiv 2502.12224): prefetches by the next layer's gate, and favours the first layers.

The first layer cannot be forecast, and the layers after it are forecast worse than later ones. So the first layers'
experts stay, as far as there is room, and the later layers share the rest. The caches' eviction rule (ARC) learns
whether recent or frequent use is the better sign. The paper also moves rare experts quantised to fewer bits,
which would change tokens and is not done here.
"""

from __future__ import annotations

from moesched.dispatch.adaptive_replacement import AdaptiveReplacement
from moesched.dispatch.setting_limits import require_at_least
from moesched.steps.plan import Plan

from .prefetch_gate import PrefetchGate


class Fate(PrefetchGate):
    """The policy `prefetch_gate` with larger caches for the first layers.

    Settings:
        shallow: number of layers whose experts all stay, if there is room.
        offload_per_layer: number of experts per layer outside the layer's cache, on average; by default the fewest that
            memory allows.
        buffers: number of slots beside the caches, for experts of any layer; all but one may hold prefetched experts.
    """

    rule = AdaptiveReplacement

    def __init__(self, shallow: int = 1, offload_per_layer: int = -1, buffers: int = 4) -> None:
        require_at_least(0, shallow=shallow)
        super().__init__(offload_per_layer, buffers)
        self.shallow = shallow

    def _rooms(self, plan: Plan) -> list[int]:
        experts, even = plan.layout.config.routed.experts, super()._rooms(plan)
        routed = [i for i in plan.layers if plan.layout.experts_of(i)]
        whole = min(self.shallow, len(routed), sum(even) // experts)
        left, layers = sum(even) - whole * experts, len(routed) - whole
        rooms = [experts] * whole + [left // layers + (n < left % layers) for n in range(layers)]
        return [rooms[routed.index(i)] if i in routed else 0 for i in plan.layers]
