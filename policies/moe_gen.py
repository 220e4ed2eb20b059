"""MoE-Gen (Xu et al. 2025, arXiv 2503.09716): attention in micro-batches, experts over all of them at once.

A batch that suits attention is too small for an expert, which gets only a part of its tokens. So micro-batches go
through attention one after the other, on either processor, with their KV caches on the host; then each expert runs once
on the tokens of all of them, while the next experts arrive. Batches are limited by the host's memory, not the GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesched.dispatch.kv_placement import split_kv
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .expert_streaming import ExpertStreaming


class MoEGen(ExpertStreaming):
    """The policy `expert_streaming` with one task for each expert, on the tokens of all micro-batches.

    Settings:
        kv_on_gpu: share (0 to 1) of the micro-batches whose KV cache is on the accelerator, where attention then runs.
        together: number of experts in one transfer.
        ahead: number of transfers that may be under way while the experts of an earlier transfer are in use.
    """

    def __init__(self, kv_on_gpu: float = 0.0, together: int = 1, ahead: int = 2) -> None:
        super().__init__(together, ahead)
        self.kv_on_gpu = kv_on_gpu

    def _place_kv(self, plan: Plan) -> None:
        split_kv(plan, self.kv_on_gpu)

    def run_expert(self, step: Step, i: int, expert: int, users: Sequence[int]) -> None:
        if users:
            step.run_expert(i, expert, users)
