"""Makes the plan of a run, checked against budgets, and the lanes that the plan runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction

from msgspec.structs import replace

from moesched.drivers.policies import policys_failures
from moesched.errors import BadInput, OverBudget, PolicyError
from moesched.machines import INTERCONNECT, Machine
from moesched.machines.group import numbered
from moesched.machines.networks import NETWORK
from moesched.models.layout import Page, WeightLayout
from moesched.requests.batch import Batch
from moesched.seams import Device, LaneKind, Policy, ReplaysGraphs, is_expert_parallel, is_pipelined
from moesched.steps.plan import Plan
from moesched.steps.process import Process
from moesched.system.source_lines import raising_line
from moesched.tasks import Lane
from moesched.units import format_bytes

SMALLER = (
    "raise --budget if you gave one, lower --batch-size or the number of new tokens, or choose another policy"
)
"""Remedies for a plan that does not fit."""
KERNELS_AHEAD = 8
"""Most tasks in the queue of an accelerator's stream; with fewer, short kernels would wait for the host."""
KERNELS_AHEAD_IN_ORDER = 64
"""The same for tasks that are queued in program order, which hold up no earlier task."""
TRANSFERS_AHEAD = 2
"""Most tasks in the queue of a copy stream; with more, urgent copies would wait for less urgent ones."""


def as_used_by(device: Device, machine: Machine) -> Machine:
    """Return the machine as a device uses it: with an accelerator that replays graphs, if the device does that."""
    if not (isinstance(device, ReplaysGraphs) and device.replays):
        return machine
    name = machine.roles.accelerator
    replaying = replace(machine.accelerator, replays=True)
    return replace(machine, processors={**machine.processors, name: replaying})


def plan_run(
    machine: Machine,
    layout: WeightLayout,
    batch: Batch,
    policy: Policy,
    budgets: Mapping[str, int] | None = None,
    slot_bytes: Callable[[Page], int] | None = None,
    nodes: int = 1,
    node: int = 0,
    *,
    process: Process | None = None,
) -> Plan:
    """Have a policy plan a batch, for one of several nodes if they share the experts.

    Args:
        layout: the model's weights, cut into pages.
        budgets: bytes by memory name; by default the memories' capacities.
        slot_bytes: returns the bytes that a page takes in a slot of the device; by default the page's bytes.
        nodes: number of machines that share the model's experts.
        node: this machine's index among them, from 0.
        process: the memory of the process that will run the plan; None if it is not known.

    Raises:
        BadInput: the plan does not fit a budget (the message names the memory and the missing bytes), or the policy or
            the machine does not support several nodes.
    """
    name = type(policy).__name__
    if nodes > 1:
        _require_node(machine, layout, policy, nodes)
    try:
        plan = Plan(
            machine,
            layout,
            batch,
            budgets,
            slot_bytes,
            nodes,
            node,
            pipelined=is_pipelined(policy),
            process=process,
        )
        with policys_failures():
            _require_plain(policy)
            policy.plan(plan)
        plan.check()
    except OverBudget as error:
        each = f", on each of {layout.config.ranks} accelerators" if layout.config.ranks > 1 else ""
        if nodes > 1:
            each = f", on node {node} of {nodes}"
        if process is not None and process.limit is not None:
            each += f", of what --budget process={format_bytes(process.limit)} leaves"
        place = f" ({line})" if (line := error.line or raising_line(error)) else ""
        raise BadInput(f"policy {name} does not fit{place}: {error}{each}: {SMALLER}") from error
    return plan


def _require_plain(policy: Policy) -> None:
    """Raise PolicyError if the policy's `plan` is a coroutine function, whose call would do nothing."""
    if iscoroutinefunction(policy.plan):
        raise PolicyError(f"plan of {type(policy).__name__} is `async def`: define it `def plan(self, plan)`")


def _require_node(machine: Machine, layout: WeightLayout, policy: Policy, nodes: int) -> None:
    if not is_expert_parallel(policy):
        raise BadInput(
            f"policy {type(policy).__name__} does not share experts among {nodes} nodes: choose one that does, "
            "such as ep_balanced, or 1 node"
        )
    if layout.config.ranks > 1:
        raise BadInput(
            f"each of {nodes} nodes can use one accelerator, but machine {machine.name} would use "
            f"{layout.config.ranks}: use --tensor-parallel 1"
        )


def make_lanes(plan: Plan, kinds: Mapping[str, LaneKind] | None = None) -> dict[str, Lane]:
    """Make the lanes of a plan's machine, by name: accelerator, host, and one for each path between memories.

    Each stage of a pipeline has its own accelerator lane: "accelerator", "accelerator 1", ... Tensor-parallel ranks add
    a lane for all-reduces. Nodes add an in-order lane for their exchanges, which come in the same order on all nodes.

    Args:
        kinds: the kind of each lane on the device, by the lane's name. Lanes of kind "stream" get `domain="device"`:
            the device itself makes the tasks on its streams wait for each other.
    """
    accelerators = [numbered("accelerator", stage) for stage in range(len(plan.stages))]
    names = [*accelerators, "host", *dict.fromkeys(link.lane for link in plan.machine.links)]
    if plan.layout.config.ranks > 1:
        names.append(INTERCONNECT)
    kinds = kinds or {}
    lanes = {
        name: Lane(
            name,
            plan.discipline,
            domain="device" if kinds.get(name) == "stream" else None,
            depth=KERNELS_AHEAD if name in accelerators else TRANSFERS_AHEAD,
            depth_in_order=KERNELS_AHEAD_IN_ORDER if name in accelerators else TRANSFERS_AHEAD,
        )
        for name in names
    }
    if plan.nodes.count > 1:
        lanes[NETWORK] = Lane(NETWORK, "in_order")
    return lanes
