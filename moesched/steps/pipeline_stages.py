"""The stages of a pipeline, each an accelerator with the layers that it computes; one stage without a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, get_args

from moesched.machines import Machine
from moesched.machines.group import numbered
from moesched.steps.plan import Plan
from moesched.steps.verbs.table import VERBS
from moesched.steps.views import Views
from moesched.tasks import Lane

StageLane = Literal["accelerator", "host", "to host", "from host", "fetch"]
"""The name of a stage's lane: a processor, or a purpose of copies; "fetch" brings pages from where the weights live."""

STAGE_LANES: tuple[StageLane, ...] = get_args(StageLane)


class PipelineStage:
    """One accelerator of a pipeline: the accelerator's lanes, and the views of pages in its memory.

    A view is the set of slots that hold the pages of one expert, dense part or layer, for kernels to read.

    Attributes:
        number: the stage's number, from 0.
        end: the layer that the next stage begins with; -1 for the last stage.
        processors: the names of the processors by role: "accelerator" and "host".
        memory: name of the accelerator's memory.
        lane, host: the lanes of the accelerator and the host.
        named_lanes: the stage's lanes by `StageLane`; copies within one memory have no lane.
        lanes: each verb's lane, by the verb's number; None for verbs with nothing to do.
        dense, whole: the views of layers' dense parts and of whole layers on the accelerator, by layer.
        expert: by processor role, the views of experts in that processor's memory, by (layer, expert).
        empty_kv_slots: numbers of the buffers of `Plan.reserve_kv_buffers` that are empty.
        onward: the hops of a hidden state to the next stage, as pairs of memories (source, destination).
    """

    def __init__(self, plan: Plan, number: int, lanes: Mapping[str, Lane]) -> None:
        machine, layout, roles = plan.machine, plan.layout, plan.machine.roles
        fast, host = plan.memory("accelerator", number), plan.memory("host")
        self.number = number
        last = number == len(plan.stages) - 1
        self.end = -1 if last else plan.stages[number].stop
        self.lane = lanes[numbered("accelerator", number)]
        self.processors = {"accelerator": numbered(roles.accelerator, number), "host": roles.host}
        self.memory = fast.name
        self.host = lanes["host"]
        self.named_lanes = {"accelerator": self.lane, "host": self.host}
        if not machine.unified:
            self.named_lanes["to host"] = lanes[machine.link(fast.name, host.name).lane]
            self.named_lanes["from host"] = lanes[machine.link(host.name, fast.name).lane]
        if machine.joins(roles.weights, fast.name):
            self.named_lanes["fetch"] = lanes[machine.link(roles.weights, fast.name).lane]
        self.lanes = [self.named_lanes.get(verb.lane or "") for verb in VERBS]
        self.dense = Views(fast, layout.dense)
        self.whole = Views(fast, layout.layer)
        self.expert: dict[str, Views[tuple[int, int]]] = {
            "accelerator": Views(fast, lambda key: layout.expert(*key)),
            "host": Views(host, lambda key: layout.expert(*key)),
        }
        self.empty_kv_slots = deque(range(number * plan.kv.slots, (number + 1) * plan.kv.slots))
        self.onward: tuple[tuple[str, str], ...] = ()
        if not last:
            self.onward = _way(machine, fast.name, plan.memory("accelerator", number + 1).name)

    @property
    def views(self) -> list[Views[Any]]:
        """All views of the stage: of dense parts, of whole layers, and of experts on either processor."""
        return [self.dense, self.whole, *self.expert.values()]


def _way(machine: Machine, source: str, destination: str) -> tuple[tuple[str, str], ...]:
    """Return the hops from one accelerator's memory to another's, as pairs of memories (source, destination).

    The hops go over the interconnect if there is one, else through the host's memory.
    """
    stops = (
        [source, destination]
        if machine.joins(source, destination)
        else [source, machine.host.memory, destination]
    )
    return tuple(pairwise(stops))
