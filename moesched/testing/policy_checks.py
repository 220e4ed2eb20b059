"""The conformance suite of policies: runs on several machines, models and batches, on a device that computes hashes.

A policy is run on the virtual clock and on real threads, with every transition of the engine checked. It must either
refuse a plan that does not fit, or end with exactly the tokens of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import msgspec

from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.validation import CheckedEngine, CheckedSharedEngine
from moesched.errors import BadInput
from moesched.jobs.cut_prompts import may_cut_prompts
from moesched.machines import Machine, load_machine
from moesched.machines.cost_model import CostModel
from moesched.machines.local import unified_machine
from moesched.machines.networks import load_network
from moesched.machines.staging import staged
from moesched.models.config import ModelConfig
from moesched.models.kv_blocks import KV_BLOCK_TOKENS
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.shapes import SHAPES
from moesched.requests.batch import Batch, split_batch
from moesched.runs.assembly import assemble
from moesched.runs.generation import TokenHandling
from moesched.runs.planning import plan_run
from moesched.runs.ranks import OnDevices, Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.runs.watched import closed_at_end
from moesched.seams import Observer, Policy, is_expert_parallel, is_pipelined, keeps_state
from moesched.serving.capacity import Capacity
from moesched.steps.plan import Plan
from moesched.system.own_loop import run_on_own_loop
from moesched.tasks import Lane, Task
from moesched.testing.served_checks import check_served, random_requests
from moesched.testing.symbolic.device import SymbolicDevice
from moesched.testing.symbolic.model import expected_tokens

Clock = Literal["virtual", "shared", "real"]
CLOCKS: tuple[Clock, ...] = ("virtual", "shared", "real")
"""Clocks of a check: "virtual"; "shared", on which concurrent tasks slow each other down; "real" for real threads."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, a small model and a batch with which a policy is checked.

    Attributes:
        prompts: number of tokens of each prompt.
        new_tokens: number of tokens to generate for each prompt.
        micro_batch_size: number of requests in a micro-batch.
        weights: room for weights in the accelerator's memory, relative to all weights; above 1 there is room to spare.
        pages_per_expert: least number of pages into which an expert's weights are divided.
        nodes: number of nodes that share the experts; each is a machine of this kind.
        ends_early: whether the sequences of the first micro-batch end with their second token, so that later steps
            leave that micro-batch out.
    """

    name: str
    machine: Machine
    layers: int = 3
    experts: int = 4
    top_k: int = 2
    prompts: tuple[int, ...] = (3, 5, 2, 4)
    new_tokens: int = 3
    micro_batch_size: int = 2
    weights: float = 1.2
    pages_per_expert: int = 1
    nodes: int = 1
    ends_early: bool = False

    def layout(self) -> WeightLayout:
        """Return the division of the model's weights into pages."""
        whole = weight_layout(self.config())
        expert = sum(page.nbytes for page in whole.expert(0, 0))
        return weight_layout(whole.config, page_bytes=max(1024, expert // self.pages_per_expert))

    @property
    def capacity(self) -> Capacity:
        """The limits of a run in which requests join and leave, with as many micro-batches as the case has."""
        places = -(-len(self.prompts) // self.micro_batch_size)
        size = self.micro_batch_size
        return Capacity(places, size, 2 * KV_BLOCK_TOKENS * size, max(self.prompts), 2 * KV_BLOCK_TOKENS)

    def plan(self, policy: Policy, node: int = 0, batch: Batch | None = None) -> Plan:
        """Return a policy's plan for one of the nodes, with room for the share `weights` of all weights.

        Args:
            node: index of the node.
            batch: the batch to plan; None for the case's own.

        Raises:
            BadInput: the policy's plan does not fit.
        """
        layout = self.layout()
        batch = batch or split_batch(self.prompts, self.new_tokens, self.micro_batch_size)
        empty = Plan(self.machine, layout, batch)
        fast = empty.memory("accelerator")
        cache = empty.reservations.cache_bytes(empty.micro_batches, empty.layers)
        weights = int(self.weights * sum(page.nbytes for page in layout.pages))
        needed = empty.reservations.needed_by_all(empty.nodes)
        used = sum(each.nbytes for each in needed if each.memory == fast.name)
        budgets = {fast.name: used + cache + weights}
        return plan_run(self.machine, layout, batch, policy, budgets, nodes=self.nodes, node=node)

    def config(self) -> ModelConfig:
        """Return the configuration of the case's model."""
        return SHAPES["mixtral-0.8b"].varied(
            self.layers,
            name=self.name,
            hidden=32,
            vocabulary=64,
            heads=4,
            kv_heads=2,
            head_dim=8,
            intermediate=64,
            experts=self.experts,
            top_k=self.top_k,
            max_positions=128,
            stop_tokens=(),
        )


def policy_cases() -> list[Case]:
    """Return the cases in which every policy is checked; they differ in all that schedules may depend on."""
    gpu = load_machine("t4")
    unified = unified_machine(
        "unified",
        memory=10**9,
        disk=10**10,
        flops={"bfloat16": 1e11},
        memory_bandwidth=2e10,
        disk_bandwidth=1e9,
    )
    return [
        Case(name="roomy GPU", machine=gpu),
        Case(name="roomy unified memory", machine=unified),
        Case(name="tight GPU", machine=gpu, weights=0.7),
        Case(name="tight unified memory", machine=unified, weights=0.7),
        Case(name="one micro-batch", machine=gpu, weights=0.7, micro_batch_size=8),
        Case(
            name="two layers, many micro-batches",
            machine=gpu,
            layers=2,
            micro_batch_size=1,
            prompts=(1,) * 5,
            new_tokens=5,
            ends_early=True,
        ),
        Case(name="uneven micro-batches", machine=unified, weights=0.8, micro_batch_size=3),
        Case(
            name="experts of several pages, staged",
            machine=staged(gpu, "16GB"),
            weights=0.7,
            pages_per_expert=3,
        ),
        Case(name="odd layers, deep", machine=unified, layers=7, weights=0.5),
        Case(name="weights on the disk", machine=load_machine("t4-nvme"), weights=0.7),
        Case(name="one layer", machine=gpu, layers=1, weights=2.2),
        Case(name="one new token", machine=gpu, new_tokens=1),
        Case(
            name="many new tokens",
            machine=gpu,
            layers=2,
            prompts=(1, 2),
            micro_batch_size=1,
            new_tokens=9,
            ends_early=True,
        ),
        Case(name="dense model", machine=unified, experts=1, top_k=1),
        Case(name="roomy GPUs", machine=load_machine("t4x2")),
        Case(name="tight GPUs", machine=load_machine("t4x2"), layers=7, weights=0.5, micro_batch_size=1),
    ]


def node_cases() -> list[Case]:
    """Return further cases for a policy that shares experts among nodes."""
    roomy = {case.name: case for case in policy_cases()}
    gpu, unified = roomy["roomy GPU"].machine, roomy["roomy unified memory"].machine
    network = load_network("10gbe")
    gpu, unified = (msgspec.structs.replace(machine, network=network) for machine in (gpu, unified))
    return [
        Case(name="two nodes", machine=unified, nodes=2),
        Case(
            name="nodes with a GPU",
            machine=gpu,
            nodes=2,
            micro_batch_size=1,
            prompts=(3, 5),
            new_tokens=5,
            ends_early=True,
        ),
        Case(name="three nodes, experts that do not divide", machine=unified, nodes=3, experts=5, top_k=3),
        Case(name="more nodes than experts chosen", machine=unified, nodes=4, experts=8, top_k=1, layers=2),
        Case(name="nodes, one layer", machine=unified, nodes=2, layers=1, weights=2.2),
        Case(name="nodes, one new token", machine=unified, nodes=2, new_tokens=1),
    ]


class Ended(msgspec.Struct):
    """Results of a finished run on a device that computes hashes; if there are several nodes, those of the first.

    Attributes:
        tokens: the generated tokens, by request.
        expected: the tokens that are right.
        tasks: all tasks that were submitted.
        nanoseconds: duration of the run.
    """

    plan: Plan
    tokens: list[list[int]]
    expected: list[list[int]]
    tasks: list[Task]
    nanoseconds: int


def run_on_symbols(
    policy: Policy,
    plan: Plan,
    clock: Clock = "virtual",
    *,
    device: SymbolicDevice | None = None,
    observers: Sequence[Observer] = (),
    peers: Sequence[tuple[Plan, Policy]] = (),
    cost: CostModel | None = None,
    stop_tokens: Collection[int] = (),
) -> Ended:
    """Run a plan on a device that computes hashes instead of tensors, with every transition of the engine checked.

    Args:
        clock: "virtual"; "shared", on which concurrent tasks slow each other down; or "real" for real threads.
        device: the first node's device; None for a new one.
        observers: called with each task of the run when it ends.
        peers: plans and policies of the other nodes, if several share the model.
        cost: gives durations on a virtual clock; None for the machine's own.
        stop_tokens: ids of the tokens that end a request.

    Raises:
        AssertionError: a peer generated other tokens than the first node.
        PolicyError: the policy submitted something illegal.
        BrokenRule: the engine broke one of its own rules.
    """
    first = device or SymbolicDevice()
    devices = [first, *(SymbolicDevice() for _ in peers)]
    ranks = [Rank(*each, own) for each, own in zip([(plan, policy), *peers], devices, strict=True)]
    for number, own in enumerate(devices):
        own.join(number, None, first)
        own.begin(ranks[number].plan)
    handling = TokenHandling(stop_tokens)
    if clock == "real":
        tokens, tasks, now = _run_in_real_time(ranks, observers, handling)
    else:
        tokens, tasks, now = _run_virtual(ranks, observers, handling, cost, sharing=clock == "shared")
    if any(of_peer != tokens[0] for of_peer in tokens):
        raise AssertionError("the nodes generated different tokens")
    expected = [_until(stop_tokens, each) for each in expected_tokens(plan)]
    return Ended(plan, tokens[0], expected, tasks, now)


def _until(stop_tokens: Collection[int], tokens: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    end = next((place for place, token in enumerate(tokens, 1) if token in stop_tokens), len(tokens))
    return list(tokens[:end])


def check_policy(
    make: Callable[[], Policy], cases: Iterable[Case] = (), clocks: Iterable[Clock] = CLOCKS
) -> int:
    """Run a policy in every case; return the number of cases in which its plan fits.

    Args:
        make: creates a new policy for each run; a policy that keeps state also runs a second batch.
        cases: by default `policy_cases()`, and `node_cases()` for a policy that shares experts among nodes.
        clocks: by default all three: "virtual"; "shared", a virtual clock on which concurrent tasks slow each other
            down; and "real" for real threads.

    Raises:
        AssertionError: the policy generated wrong tokens or exceeded a budget, or its plan fits in no case.
        Exception: the policy submitted something illegal, or raised an error of its own; a note on it names the case.
    """
    taken = 0
    unfit: list[str] = []
    if not cases:
        cases = policy_cases() + (node_cases() if is_expert_parallel(make()) else [])
    for case in cases:
        for clock in clocks:
            policies = [make() for _ in range(case.nodes)]
            try:
                plans = _plans(case, policies)
            except BadInput as error:
                unfit.append(f"{case.name}: {error}")
                break
            where, early = f"{case.name}, {clock} clock", case.ends_early
            try:
                check_plans(plans, policies, clock, where, ends_early=early)
                if keeps_state(policies[0]):
                    again = _plans(case, policies)
                    check_plans(again, policies, clock, f"{where}, second batch", ends_early=early)
                if clock == "virtual" and not is_pipelined(policies[0]):
                    where = f"{where}, requests that join and leave"
                    _check_served([make() for _ in range(case.nodes)], case)
            except Exception as error:
                error.add_note(f"in the case {where}")
                raise
        else:
            taken += 1
    if not taken:
        raise AssertionError(f"the policy's plan fits in none of {len(unfit)} cases; the first is {unfit[0]}")
    return taken


def _check_served(policies: Sequence[Policy], case: Case) -> None:
    """Serve random requests that join and leave a run of a case's model on its machine, and check their tokens.

    In about half of the cases, prompts are divided over several steps, if the plan allows it.

    Args:
        policies: a policy for each node.
    """
    capacity, seed, longest = case.capacity, len(case.name), max(case.prompts)
    requests = random_requests(seed, longest, 2 * case.new_tokens)
    fullest = capacity.fullest()
    first, *peers = [(case.plan(each, node, fullest), each) for node, each in enumerate(policies)]
    if seed % 2 and may_cut_prompts(first[0]):
        capacity = msgspec.structs.replace(capacity, chunk=-(-longest // 3))
    check_served(first[1], first[0], capacity, requests, peers=peers)


def _plans(case: Case, policies: Sequence[Policy]) -> list[Plan]:
    """Return a plan of the case for each node, made by the node's policy."""
    return [case.plan(policy, node) for node, policy in enumerate(policies)]


def check_plans(
    plans: Sequence[Plan],
    policies: Sequence[Policy],
    clock: Clock,
    where: str,
    cost: CostModel | None = None,
    *,
    ends_early: bool = False,
) -> None:
    """Run the plans of all nodes, and check the tokens and the use of memory.

    Args:
        plans, policies: a plan and its policy for each node.
        clock: "virtual"; "shared", on which concurrent tasks slow each other down; or "real" for real threads.
        where: names the case in messages.
        cost: gives durations on a virtual clock; None for the cost model of the plan's machine.
        ends_early: whether the sequences of the first micro-batch end with their second token.

    Raises:
        AssertionError: the tokens are wrong, or a budget was exceeded.
        Exception: the policy submitted something illegal, or raised an error of its own.
    """
    (plan, policy), *peers = zip(plans, policies, strict=True)
    stop_tokens: set[int] = set()
    if ends_early:
        tokens = expected_tokens(plan)
        stop_tokens = {tokens[request][1] for request in plan.batch.micro_batches[0]}
    ended = run_on_symbols(policy, plan, clock, peers=peers, cost=cost, stop_tokens=stop_tokens)
    if ended.tokens != ended.expected:
        raise AssertionError(f"{where}: wrong tokens")
    memories = [memory for each in plans for memory in each.memories.values()]
    over = [memory.name for memory in memories if memory.peak > memory.capacity]
    if over:
        raise AssertionError(f"{where}: more than the budget of {over}")


def _run_virtual(
    ranks: Sequence[Rank],
    observers: Sequence[Observer],
    handling: TokenHandling,
    cost: CostModel | None,
    *,
    sharing: bool,
) -> tuple[list[list[list[int]]], list[Task], int]:
    """Run all ranks on the virtual clock, with the given observers and handling of tokens.

    Args:
        handling: the stop tokens, and a callback for new tokens.
        cost: gives durations; None for the machine's own.
        sharing: whether concurrent tasks slow each other down.

    Returns:
        Each rank's tokens by request, the first rank's tasks, and the run's nanoseconds.
    """
    engines: list[CheckedEngine] = []

    def make_engine(lanes: Iterable[Lane]) -> CheckedEngine:
        engines.append(CheckedEngine(lanes))
        return engines[-1]

    virtual = VirtualRun(
        ranks, cost=cost, sharing=sharing, make_engine=make_engine, observers=observers, tokens=handling
    )
    return virtual.run(), engines[0].tasks, virtual.now


def _run_in_real_time(
    ranks: Sequence[Rank], observers: Sequence[Observer], handling: TokenHandling
) -> tuple[list[list[list[int]]], list[Task], int]:
    """Run all ranks on real threads.

    handling: the stop tokens, and a callback for new tokens.

    Returns:
        Each rank's tokens by request, the first rank's tasks, and the run's nanoseconds.
    """
    rank_runs = [assemble(rank, CheckedSharedEngine, tokens=handling) for rank in ranks]
    execute = OnDevices(ranks, [each.lanes.values() for each in rank_runs]).execute
    driver = RealtimeDriver([each.engine for each in rank_runs], execute, observers=observers)

    async def generate() -> list[list[list[int]]]:
        return await driver.run(*(each.generation.run() for each in rank_runs))

    with closed_at_end(rank_runs):
        return run_on_own_loop(generate), rank_runs[0].engine.tasks, driver.now
