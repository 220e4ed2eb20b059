"""Simulation of one request on a cluster of Macs: a token's time, split into experts, communication and the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

import msgspec
from msgspec.structs import replace

from moesched.drivers.wired_memory import EXPERT_VERBS
from moesched.machines import Machine, load_machine
from moesched.machines.networks import NETWORK, load_network
from moesched.machines.sustained import at_peak
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.reproduce.mac_cluster.paper import MacPaper, PrintedSystem
from moesched.requests.batch import Batch, split_batch
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.tasks import Task


class TokenTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the first node takes to generate one token, split by their use.

    Attributes:
        moe: experts.
        comm: exchanges, and waiting for the other nodes.
        misc: everything else in the layers, including the handover of results to the network.
        ends: embedding and sampling, which the paper's breakdown omits.
    """

    moe: float
    comm: float
    misc: float
    ends: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.moe + self.comm + self.misc + self.ends


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a request on a simulated cluster.

    Attributes:
        token: time of a token, on average over all decode steps.
        prompt_seconds: seconds of the prefill.
    """

    token: TokenTime
    prompt_seconds: float


class _Breakdown:
    """Observer that adds up the time of the first node's decode tasks, in nanoseconds.

    Args:
        handover: seconds that the node takes to pass one result to the network.

    Attributes:
        moe: time of the experts.
        misc: time of the layers' other tasks, and of passing their results to the network.
        ends: time of the tasks outside the layers, exchanges included.
    """

    def __init__(self, handover: float) -> None:
        self.moe = self.misc = self.ends = 0
        self._handover = round(handover * 1e9)

    def ended(self, task: Task) -> None:
        if task.phase != "decode":
            return
        took = task.end - task.start
        within = task.layer >= 0
        if task.lane.name == NETWORK:
            self._add(self._handover if within else self._handover + took, within=within)
        elif task.lane.name == "accelerator" and task.verb in EXPERT_VERBS:
            self.moe += took
        elif task.lane.name == "accelerator":
            self._add(took, within=within)

    def _add(self, took: int, *, within: bool) -> None:
        if within:
            self.misc += took
        else:
            self.ends += took


def run_system(
    paper: MacPaper,
    system: PrintedSystem,
    prompt: int,
    new_tokens: int,
    chunk: int | None = None,
) -> Simulated:
    """Simulate one request on the cluster of a table's row, and return the times of its prompt and of a token.

    Args:
        system: the row.
        prompt: number of prompt tokens.
        new_tokens: number of tokens to generate.
        chunk: number of prompt tokens that pass a layer together; None for all.
    """
    machine = mac_of(paper, system)
    return run_request(
        machine, paper, system.policy, system.settings, system.nodes, prompt, new_tokens, chunk
    )


def mac_of(paper: MacPaper, system: PrintedSystem) -> Machine:
    """Return the simulated Mac for the nodes of a table's row, with the row's weight packing and network latency."""
    machine = at_peak(load_machine(paper.machine))
    assert machine.wired_memory is not None
    latency = paper.latency.decentralised + paper.latency.each_further_node * (system.nodes - 2)
    if system.centralised:
        latency = paper.latency.centralised
    return replace(
        machine,
        network=replace(load_network(paper.network), latency_seconds=latency),
        wired_memory=replace(machine.wired_memory, prestacked=system.prestacked, standby=system.standby),
    )


def run_request(
    machine: Machine,
    paper: MacPaper,
    policy: str,
    settings: Mapping[str, bool | int],
    nodes: int,
    prompt: int,
    new_tokens: int,
    chunk: int | None = None,
) -> Simulated:
    """Simulate one request on a cluster of equal machines; experts are chosen uniformly at random.

    Args:
        machine: the machine that each node is.
        paper: names the model.
        policy: name of the policy, which gets `settings`.
        nodes: number of nodes.
        prompt: number of prompt tokens.
        new_tokens: number of tokens to generate.
        chunk: number of prompt tokens that pass a layer together; None for all.
    """
    layout = weight_layout(SHAPES[paper.model])
    batch = replace(split_batch([prompt], new_tokens, 1), prefill_chunk=chunk)
    first, *peers = _ranks(machine, layout, batch, policy, settings, nodes)
    breakdown = _Breakdown(machine.accelerator.handover_seconds)
    report = simulate(first.plan, first.policy, observers=[breakdown], peers=peers)
    decoded = new_tokens - 1
    moe, misc, ends = (each / decoded / 1e9 for each in (breakdown.moe, breakdown.misc, breakdown.ends))
    comm = fmean(report.step_seconds[1:]) - moe - misc - ends
    return Simulated(
        token=TokenTime(moe=moe, comm=comm, misc=misc, ends=ends), prompt_seconds=report.prefill_seconds
    )


def _ranks(
    machine: Machine,
    layout: WeightLayout,
    batch: Batch,
    policy: str,
    settings: Mapping[str, bool | int],
    nodes: int,
) -> Iterator[Rank]:
    for node in range(nodes):
        made = make_policy(policy, dict(settings))
        yield Rank(plan_run(machine, layout, batch, made, nodes=nodes, node=node), made)
