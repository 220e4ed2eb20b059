"""A cluster of simulated Macs: what a token takes there, and how much of it is experts, communication and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import msgspec
from msgspec.structs import replace

from moesched.machines import Machine, load_machine
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.shapes import SHAPES
from moesched.networks import NETWORK, load_network
from moesched.parallel.ranks import Rank
from moesched.plan import Batch, split_batch
from moesched.plugins import make_policy
from moesched.routing import SeededRouting
from moesched.runs import plan_run, simulate
from moesched.tasks import Task
from moesched.wiring import EXPERT_VERBS

MACHINE = "m2-ultra-macos14"
MODEL = "dbrx"


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the paper's tables: what runs on how many nodes.

    Attributes:
        settings: of the policy.
        prestacked, standby: of the weights (see `Wiring`).
        latency_seconds: of an exchange.
    """

    name: str
    nodes: int
    policy: str
    settings: dict[str, bool | int] = {}
    prestacked: bool = True
    standby: bool = True
    latency_seconds: float


class TokenTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one token takes, in seconds, as the first node sees it.

    Attributes:
        moe: experts. comm: exchanges, and waiting for the other nodes. misc: all else in the layers, with what passes
            before the network has what the accelerator made.
        ends: embedding and sampling, which the paper's breakdown leaves out.
    """

    moe: float
    comm: float
    misc: float
    ends: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.moe + self.comm + self.misc + self.ends


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """A request on a simulated cluster.

    Attributes:
        token: the mean over all decode steps.
        prompt_seconds: of the prompt.
    """

    token: TokenTime
    prompt_seconds: float


class _Breakdown:
    """Adds up, of the first node's decode steps, where the time went; an observer."""

    def __init__(self, handover: float) -> None:
        self.moe = self.misc = self.ends = 0
        self._handover = round(handover * 1e9)

    def ended(self, task: Task) -> None:
        took = task.end - task.start
        if task.step < 1:
            return
        if task.lane.name == NETWORK:
            if task.layer >= 0:
                self.misc += self._handover
            else:
                self.ends += self._handover + took
        elif task.lane.name == "accelerator":
            if task.verb in EXPERT_VERBS:
                self.moe += took
            elif task.layer >= 0:
                self.misc += took
            else:
                self.ends += took


def simulate_system(system: System, prompt: int, new_tokens: int, chunk: int | None = None) -> Simulated:
    """One request on a cluster, from its prompt to the last token.

    chunk: tokens that pass a layer together in the prompt; by default all.
    """
    layout = weight_layout(SHAPES[MODEL])
    batch = replace(split_batch([prompt], new_tokens, 1), prefill_chunk=chunk)
    first, *peers = _ranks(system, layout, batch)
    machine = first.plan.machine
    breakdown = _Breakdown(machine.accelerator.handover_seconds)
    routing = SeededRouting(layout.config.experts, layout.config.top_k)
    report = simulate(first.plan, first.policy, routing=routing, observers=[breakdown], peers=peers)
    steps = new_tokens - 1
    moe, misc, ends = (
        nanoseconds / steps / 1e9 for nanoseconds in (breakdown.moe, breakdown.misc, breakdown.ends)
    )
    comm = fmean(report.step_seconds[1:]) - moe - misc - ends
    return Simulated(
        token=TokenTime(moe=moe, comm=comm, misc=misc, ends=ends), prompt_seconds=report.prefill_seconds
    )


def machine_of(system: System) -> Machine:
    """A node of it."""
    machine = load_machine(MACHINE)
    assert machine.wiring is not None
    return replace(
        machine,
        network=replace(load_network("10gbe"), latency_seconds=system.latency_seconds),
        wiring=replace(machine.wiring, prestacked=system.prestacked, standby=system.standby),
    )


def _ranks(system: System, layout: WeightLayout, batch: Batch) -> Iterator[Rank]:
    machine = machine_of(system)
    for node in range(system.nodes):
        policy = make_policy(system.policy, system.settings)
        plan = plan_run(machine, layout, batch, policy, nodes=system.nodes, node=node)
        yield Rank(plan, policy)
