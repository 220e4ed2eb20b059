"""What all verbs share: the micro-batches of a step, the stages that these pass, what is said of a wrong one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from moesched.errors import OutOfOrder
from moesched.steps.memory import View, Views
from moesched.steps.run_state import STRIDE, Kind, MicroBatch, RunState
from moesched.tasks import Block

INPUT, QKV, QKV_HOST, ATTENDED_HOST, ATTENDED, ROUTED = range(6)
STAGES = ("input", "qkv", "qkv on the host", "attended on the host", "attended", "routed")

EVERYWHERE = ("route", "assign", "run_expert", "warm_expert", "combine", "sample")
"""Verbs of nodes that do not attend."""

K = TypeVar("K", bound=Hashable)


class Verbs:
    """A step, as far as all verbs need it; the attributes are those of `Step`."""

    def __init__(self, run_state: RunState, index: int, *, last: bool = False) -> None:
        self._run = run_state
        self._engine = run_state.engine
        self._submit = run_state.submit
        self._batches = run_state.batches(index)
        self._base = index * run_state.stride
        self._limited = run_state.limited and not index
        self._host = run_state.lanes["host"]
        self._weights = run_state.plan.machine.roles.weights
        self._placement = run_state.plan.placement
        self.nodes, self.node = run_state.plan.nodes, run_state.plan.node
        self.attends = run_state.plan.attends
        self.kind: Kind = "decode" if index else "prefill"
        self.index = index
        self.last = last
        self.chunked = not index and run_state.plan.chunked
        self.layers = run_state.plan.layers
        self.micro_batches = range(len(self._batches))
        run_state.size(index)

    def _view(self, views: Views[K], key: K) -> View[K]:
        return views.show(key, self._engine)

    def _leaving(self, batch: MicroBatch, reads: tuple[Block, ...]) -> tuple[Block, ...]:
        """What a verb reads that may be the micro-batch's last in the layer; its room is free for another then."""
        place = batch.room
        if place is None:
            return reads
        if batch.unsaved < 0 and batch.tag % STRIDE == self._base % STRIDE:
            batch.room = None
            self._run.rooms.append(place)
        return (*reads, place)

    def _where(self, batch: MicroBatch) -> str:
        step, rest = divmod(batch.tag + 1, self._run.stride)
        if not rest:
            return f"the end of step {step - 1}" if step else "the start"
        layer, stage = divmod(rest - 1, STRIDE)
        unsaved = ", its keys and values not saved: offload_kv them" if batch.unsaved >= 0 else ""
        return f"step {step} L{layer} {STAGES[stage]}{unsaved}"

    def _out_of_order(self, verb: str, layer: int, batch: MicroBatch, needed: int) -> OutOfOrder:
        if not self.attends and verb not in EVERYWHERE:
            return OutOfOrder(
                f"{verb}: node {self.node} does not attend, as the plan is centralised: leave it out where not "
                "step.attends"
            )
        needs = (
            "the end of the step before"
            if needed == self._base - 1
            else f"step {self.index} L{layer} {STAGES[needed % STRIDE]}"
        )
        where = self._where(batch)
        return OutOfOrder(
            f"{verb}(L{layer}, mb{batch.index}) needs mb{batch.index} at {needs}, but it is at {where}"
        )
