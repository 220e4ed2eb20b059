"""What all verbs share: the micro-batches of a step, the stages that these pass, what is said of a wrong one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from moesched.errors import OutOfOrder
from moesched.memory import View, Views
from moesched.schedule import STRIDE, Kind, MicroBatch, Schedule
from moesched.tasks import Block

INPUT, QKV, QKV_HOST, ATTENDED_HOST, ATTENDED, ROUTED = range(6)
STAGES = ("input", "qkv", "qkv on the host", "attended on the host", "attended", "routed")

EVERYWHERE = ("route", "assign", "run_expert", "touch_expert", "combine", "sample")
"""Verbs of nodes that do not attend."""

K = TypeVar("K", bound=Hashable)


class Verbs:
    """A step, as far as all verbs need it; the attributes are those of `Step`."""

    def __init__(self, schedule: Schedule, index: int, *, last: bool = False) -> None:
        self._schedule = schedule
        self._engine = schedule.engine
        self._submit = schedule.submit
        self._batches = schedule.batches(index)
        self._base = index * schedule.stride
        self._limited = schedule.limited and not index
        self._host = schedule.lanes["host"]
        self._weights = schedule.plan.machine.roles.weights
        self._placement = schedule.plan.placement
        self.nodes, self.node = schedule.plan.nodes, schedule.plan.node
        self.attends = schedule.plan.attends
        self.kind: Kind = "decode" if index else "prefill"
        self.index = index
        self.last = last
        self.chunked = not index and schedule.plan.chunked
        self.layers = schedule.plan.layers
        self.micro_batches = range(len(self._batches))
        schedule.size(index)

    def _view(self, views: Views[K], key: K) -> View[K]:
        return views.show(key, self._engine)

    def _leaving(self, batch: MicroBatch, reads: tuple[Block, ...]) -> tuple[Block, ...]:
        """What a verb reads that may be the micro-batch's last in the layer; its room is free for another then."""
        place = batch.place
        if place is None:
            return reads
        if batch.unsaved < 0 and batch.tag % STRIDE == self._base % STRIDE:
            batch.place = None
            self._schedule.places.append(place)
        return (*reads, place)

    def _where(self, batch: MicroBatch) -> str:
        step, rest = divmod(batch.tag + 1, self._schedule.stride)
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
