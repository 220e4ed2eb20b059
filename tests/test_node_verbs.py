"""Expert parallelism, scheduled: what a policy for several nodes may say, what it may not, and what it comes to."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clocks_in_turn import PLAIN, in_turn
from moesched.dispatch.node_placement import Placement
from moesched.errors import BadInput, OutOfOrder, PolicyError
from moesched.machines import Machine
from moesched.machines.local import unified_machine
from moesched.machines.networks import NETWORK, Network
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.testing import Case, check_policy, node_cases, run_on_symbols
from moesched.trace import LaneName, Recorder, Slice

MACHINE = unified_machine(
    "a node", memory=10**9, disk=10**10, flops={"bfloat16": 1e11}, memory_bandwidth=2e10, disk_bandwidth=1e9
)
NODES = Case(name="nodes", machine=MACHINE, nodes=2, layers=2, prompts=(3,), micro_batch_size=1, new_tokens=2)
HALVES: Placement = (frozenset({0, 1}), frozenset({2, 3}))
POLICIES = ["ep_naive", "ep_busy_full", "ep_router_aided", "ep_balanced"]

Script = Callable[[Step, Mapping[int, int]], Awaitable[None]]


class Scripted:
    """Does in its first layer what a test says, with what the router chose there."""

    expert_parallel = True

    def __init__(self, script: Script, placement: Any = HALVES, *, centralised: bool = False) -> None:
        self.script = script
        self.placement = placement
        self.centralised = centralised

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.place_experts(self.placement, centralised=self.centralised)

    async def prefill(self, step: Step) -> None:
        if step.attends:
            step.embed(0)
            step.pre_attention(0, 0)
            step.attention(0, 0)
        await self.script(step, await step.route(0, 0))

    async def decode(self, step: Step) -> None: ...


def owners_of(routed: Mapping[int, int]) -> dict[int, int]:
    return {expert: 0 if expert in HALVES[0] else 1 for expert in routed}


def run_case(policies: list[Any], case: Case = NODES) -> list[list[int]]:
    (plan, policy), *peers = [(case.plan(policy, node), policy) for node, policy in enumerate(policies)]
    ended = run_on_symbols(policy, plan, peers=peers)
    assert ended.tokens == ended.expected
    return ended.tokens


def refusal(script: Script, **options: Any) -> str:
    """Refusal of a schedule, raised at the policy's own line."""
    with pytest.raises(PolicyError) as caught:
        run_case([Scripted(script, **options) for _ in range(2)])
    assert any(Path(entry.path).name == Path(__file__).name for entry in caught.traceback)
    return str(caught.value)


# -- what conforms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "policy", "decentralised"),
    [(number, *each) for number, each in enumerate(product(POLICIES, [True, False]))],
    ids=str,
)
def test_a_policy_takes_on_every_number_of_nodes(number: int, policy: str, decentralised: bool) -> None:
    """With its own settings, tests/test_policies.py runs it in these cases on the plain virtual clock."""
    cases, settings = node_cases(), {"decentralised": decentralised}
    own: Any = make_policy(policy)
    if own.decentralised != decentralised:
        assert check_policy(lambda: make_policy(policy, settings), cases, [PLAIN]) == len(cases)
    assert check_policy(lambda: make_policy(policy, settings), *in_turn(number, cases))


@pytest.mark.parametrize("decentralised", [True, False])
def test_prompts_in_chunks_pass_all_nodes(decentralised: bool) -> None:
    case = msgspec.structs.replace(NODES, prompts=(5, 9, 2))
    made = [make_policy("ep_router_aided", {"decentralised": decentralised}) for _ in range(2)]
    batch = msgspec.structs.replace(split_batch(case.prompts, 3, 2), prefill_chunk=4)
    (plan, policy), *peers = [
        (
            plan_run(
                joined(latency_seconds=0.0, bandwidth=1e9), case.layout(), batch, each, nodes=2, node=node
            ),
            each,
        )
        for node, each in enumerate(made)
    ]
    ended = run_on_symbols(policy, plan, peers=peers)
    assert plan.batch.chunked
    assert ended.tokens == ended.expected


# -- what is refused -------------------------------------------------------------------------------


async def assign_twice(step: Step, routed: Mapping[int, int]) -> None:
    step.assign(0, 0, owners_of(routed))
    step.assign(0, 0, owners_of(routed))


async def assign_too_few(step: Step, routed: Mapping[int, int]) -> None:
    step.assign(0, 0, dict(list(owners_of(routed).items())[1:]))


async def assign_to_a_stranger(step: Step, routed: Mapping[int, int]) -> None:
    step.assign(0, 0, dict.fromkeys(routed, 2))


async def assign_to_who_does_not_hold_it(step: Step, routed: Mapping[int, int]) -> None:
    step.assign(0, 0, {expert: 1 - node for expert, node in owners_of(routed).items()})


async def run_before_assigning(step: Step, routed: Mapping[int, int]) -> None:
    step.run_expert(0, min(routed), 0)


async def run_another_node_s(step: Step, routed: Mapping[int, int]) -> None:
    owners = owners_of(routed)
    step.assign(0, 0, owners)
    step.run_expert(0, next(expert for expert, node in owners.items() if node != step.node), 0)


async def leave_out_its_own(step: Step, routed: Mapping[int, int]) -> None:
    step.assign(0, 0, owners_of(routed))
    step.combine(0, 0)


async def combine_before_assigning(step: Step, routed: Mapping[int, int]) -> None:
    step.combine(0, 0)


async def touch_another_node_s(step: Step, routed: Mapping[int, int]) -> None:
    step.warm_expert(0, min(HALVES[1 - step.node]), 0)


async def touch_what_does_not_exist(step: Step, routed: Mapping[int, int]) -> None:
    step.warm_expert(0, 4, 0)


async def route_beyond_the_last_layer(step: Step, routed: Mapping[int, int]) -> None:
    await run_routed(step, 0, routed)
    if step.attends:
        step.pre_attention(1, 0)
        step.attention(1, 0)
    await run_routed(step, 1, await step.route(1, 0))
    if not step.attends:
        with pytest.raises(
            OutOfOrder, match="route: the model has no L2: its layers are L0 to L1: loop over"
        ):
            step.route(2, 0)
    step.sample(0)


async def run_routed(step: Step, layer: int, routed: Mapping[int, int]) -> None:
    owners = owners_of(routed)
    step.assign(layer, 0, owners)
    for expert, node in owners.items():
        if node == step.node:
            step.run_expert(layer, expert, 0)
    await step.combine(layer, 0)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (assign_twice, "assign: the experts of L0 mb0 were assigned already"),
        (assign_too_few, r"assign\(L0, mb0\): it leaves out E\d, which tokens were routed to"),
        (assign_to_a_stranger, r"assign\(L0, mb0\): E\d is given to node 2, and nodes go from 0 to 1"),
        (
            assign_to_who_does_not_hold_it,
            r"assign\(L0, mb0\): E\d is given to node \d, which does not hold it",
        ),
        (run_before_assigning, "run_expert: say which node runs which experts of L0 mb0 before: assign them"),
        (run_another_node_s, r"run_expert: E\d of L0 mb0 was assigned to node \d, and this is node \d"),
        (leave_out_its_own, r"combine: L0 mb0 was routed to E\d(, E\d)*, which did not run"),
        (combine_before_assigning, "combine: the experts of L0 mb0 were not assigned: assign them"),
        (touch_another_node_s, r"E\d"),
        (touch_what_does_not_exist, "warm_expert: L0 has no E4: its experts are E0 to E3"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_nodes_may_not_do_is_refused_at_the_policy_s_line(script: Script, said: str) -> None:
    assert re.search(said, refusal(script))


async def assign_what_was_not_routed(step: Step, routed: Mapping[int, int]) -> None:
    step.assign(0, 0, owners_of(range(4)))  # type: ignore[arg-type]


def test_an_expert_that_nothing_was_routed_to_cannot_be_assigned() -> None:
    case = msgspec.structs.replace(NODES, prompts=(1,), top_k=1)
    with pytest.raises(PolicyError, match=r"no token was routed to E\d: omit it, or use warm_expert"):
        run_case([Scripted(assign_what_was_not_routed) for _ in range(2)], case)


class Unrouted(Scripted):
    """Does in its first layer what a test says, before the router has chosen; and does not look who attends."""

    async def prefill(self, step: Step) -> None:
        step.embed(0)
        step.pre_attention(0, 0)
        step.attention(0, 0)
        await self.script(step, {})


async def assign_at_once(step: Step, routed: Mapping[int, int]) -> None:
    step.route(0, 0)
    step.assign(0, 0, {0: 0})


async def run_the_layer_as_one_kernel(step: Step, routed: Mapping[int, int]) -> None:
    step.post_attention(0, 0)


async def run_own(step: Step, routed: Mapping[int, int]) -> None:
    await run_routed(step, 0, await step.route(0, 0))


@pytest.mark.parametrize(
    ("script", "error", "said", "centralised"),
    [
        (assign_at_once, OutOfOrder, r"assign: await route\(0, 0\) before", False),
        (
            run_own,
            OutOfOrder,
            "embed: node 1 does not attend, as the plan is centralised",
            True,
        ),
        (
            run_the_layer_as_one_kernel,
            PolicyError,
            "post_attention: other nodes run experts of this layer",
            False,
        ),
    ],
    ids=["the router must be awaited", "the first node attends", "a layer is no single kernel"],
)
def test_an_order_that_nodes_may_not_have_is_refused(
    script: Script, error: type[Exception], said: str, centralised: bool
) -> None:
    with pytest.raises(error, match=said):
        run_case([Unrouted(script, centralised=centralised) for _ in range(2)])


def test_a_node_that_does_not_attend_is_told_that_there_is_no_further_layer() -> None:
    machine = joined(latency_seconds=0.0, bandwidth=1e9)
    case = msgspec.structs.replace(NODES, machine=machine, new_tokens=1)
    assert run_case([Scripted(route_beyond_the_last_layer, centralised=True) for _ in range(2)], case)


async def to_node(step: Step, routed: Mapping[int, int], node: int) -> None:
    step.assign(0, 0, dict.fromkeys(routed, node))
    if step.node == node:
        for expert in routed:
            step.run_expert(0, expert, 0)
    await step.combine(0, 0)


def test_nodes_that_disagree_on_who_runs_what_are_named() -> None:
    everywhere = (frozenset(range(4)), frozenset(range(4)))
    policies = [Scripted(partial(to_node, node=node), everywhere) for node in range(2)]
    with pytest.raises(PolicyError, match=r"(?s)disagree.*rank 0: .*of node 0.*rank 1: .*of node 1"):
        run_case(policies)


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ([{0, 1, 2, 3}], "the placement is for 1 nodes, but there are 2"),
        ([{0, 1}, {2}], "no node holds E3: each expert needs one at least"),
        ([{0, 1}, {2, 3, 4}], "there is no E4: experts go from 0 to 3"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(placement: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=f"place_experts: {said}"):
        NODES.plan(Scripted(leave_out_its_own, placement))


def test_experts_of_numpy_are_placed_as_plain_integers_which_messages_can_hold() -> None:
    plan = NODES.plan(Scripted(leave_out_its_own, np.array_split(np.arange(4), 2)))
    assert plan.nodes.placement == HALVES
    assert {type(expert) for held in plan.nodes.placement for expert in held} == {int}


def test_experts_that_do_not_fit_a_node_are_refused_with_the_bytes_and_the_node() -> None:
    case = msgspec.structs.replace(NODES, weights=0.6)
    lopsided = ({0}, {0, 1, 2, 3})
    case.plan(Scripted(leave_out_its_own, lopsided))
    said = (
        r"policy Scripted does not fit: a share of 4 experts of each layer, with what every token uses, needs [\d,]+ "
        r"bytes of host, which has [\d,]+ free of its budget of [\d,]+: [\d,]+ bytes too few, "
        r"on node 1 of 2: raise --budget"
    )
    with pytest.raises(BadInput, match=said):
        case.plan(Scripted(leave_out_its_own, lopsided), node=1)


def test_nodes_that_do_not_attend_keep_nothing_but_experts() -> None:
    first, second = (NODES.plan(make_policy("ep_naive"), node) for node in range(2))
    assert (first.nodes.attends, second.nodes.attends) == (True, False)
    assert {page.expert for page in second.nodes.pages(second.layout)} == {2, 3}
    assert {page.expert for page in first.nodes.pages(first.layout)} == {-1, 0, 1}
    assert second.memory("accelerator").used < first.memory("accelerator").used


def test_beam_search_needs_every_node_to_attend() -> None:
    batch = msgspec.structs.replace(split_batch([3], 2, 1), beams=2)
    with pytest.raises(BadInput, match="beam search needs every node to attend"):
        plan_run(MACHINE, NODES.layout(), batch, make_policy("ep_naive"), nodes=2)


# -- on the virtual clock --------------------------------------------------------------------------


def joined(**network: float) -> Machine:
    return msgspec.structs.replace(MACHINE, network=Network(name="wire", **network))  # type: ignore[arg-type]


def slices_of(policy: str, machine: Machine, nodes: int = 2, **settings: Any) -> tuple[list[Slice], Any]:
    layout = weight_layout(NODES.config())
    batch = split_batch([1], 2, 1)
    ranks = []
    for node in range(nodes):
        made = make_policy(policy, settings)
        ranks.append(Rank(plan_run(machine, layout, batch, made, nodes=nodes, node=node), made))
    first, *peers = ranks
    recorder = Recorder()
    report = simulate(first.plan, first.policy, recorder=recorder, peers=peers)
    return sorted(recorder.recording().slices, key=lambda each: (each.lane.rank, each.id)), report


def test_an_exchange_takes_the_network_s_latency_and_its_bytes() -> None:
    """One token of 32 numbers: 128 bytes in float32 take 128 us at 1 MB/s, after a latency of 1 ms."""
    slices, report = slices_of("ep_router_aided", joined(latency_seconds=1e-3, bandwidth=1e6))
    reduced = [each for each in slices if each.task.verb == "all_reduce"]
    assert len(reduced) == 2 * 2 * NODES.layers
    assert {each.end - each.start for each in reduced} == {1_128_000}
    assert report.lanes[NETWORK].busy_seconds == pytest.approx(2 * NODES.layers * 1.128e-3)
    assert report.nodes == 2


def test_a_run_of_several_nodes_is_not_replayed() -> None:
    policies = [make_policy("ep_balanced") for _ in range(2)]
    first, second = (Rank(NODES.plan(each, node), each) for node, each in enumerate(policies))
    with pytest.raises(BadInput, match="replay needs one node, and the plan has 2: give replay=False"):
        simulate(first.plan, first.policy, replay=True, peers=[second])


def test_a_centralised_plan_exchanges_twice_a_layer() -> None:
    """Out go the row, choices and weights of a token, 4 * (32 + 2 * 2) bytes, back comes a sum of 4 * 32."""
    slices, _ = slices_of("ep_naive", joined(latency_seconds=0.0, bandwidth=1e6))
    on_second = [each for each in slices if each.lane == LaneName(1, NETWORK) and each.step == 1]
    spans = [(each.task.verb, each.end - each.start) for each in on_second]
    layer = [("broadcast", 144_000), ("gather", 128_000)]
    assert spans == [*layer, *layer, ("broadcast", 8_000)]


def test_both_sides_of_an_exchange_start_when_the_later_one_is_ready() -> None:
    slices, _ = slices_of("ep_busy_full", joined(latency_seconds=1e-3, bandwidth=1e6))
    first, second = (
        {each.ticket: each for each in slices if each.ticket >= 0 and each.lane.rank == rank}
        for rank in range(2)
    )
    assert first.keys() == second.keys()
    assert all((each.start, each.end) == (second[t].start, second[t].end) for t, each in first.items())


def test_what_runs_on_one_node_slows_nothing_on_another() -> None:
    """Both nodes read all of their experts in the time that one alone would take."""
    alone, _ = slices_of("ep_busy_full", MACHINE, nodes=1)
    both, _ = slices_of("ep_busy_full", joined(latency_seconds=0.0, bandwidth=1e9))
    times = [
        {each.end - each.start for each in some if each.task.verb == "warm_expert"} for some in (alone, both)
    ]
    assert times[0] == times[1]


def test_every_part_of_a_verb_names_the_policy_s_line() -> None:
    slices, _ = slices_of("ep_naive", joined(latency_seconds=0.0, bandwidth=1e9))
    lines = {each.task.verb: each.line for each in slices if each.step == 1}
    assert all("node_steps.py" in lines[verb] for verb in ("broadcast", "gather", "partial_sum", "sample"))
