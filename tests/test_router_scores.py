"""Router scores: the router's probabilities beside the tokens that each expert gets, on every device."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES, Generated, generate, same_bits
from moesched import plugins
from moesched.devices.kernels import functions
from moesched.devices.torch.device import TorchDevice
from moesched.dispatch import NodeExperts
from moesched.dispatch.node_placement import Placement
from moesched.errors import BadInput, PolicyError
from moesched.inputs.accelerators import cut_over_ranks
from moesched.machines import Machine, load_machine, parse_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.requests.batch import split_batch
from moesched.routing import ScoredTokens, SeededRouting
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank, open_devices
from moesched.runs.simulation import simulate
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.testing import Case, check_policy, node_cases, run_on_symbols
from moesched.testing.adversarial import Adversarial
from moesched.testing.previewing import Previewing
from odd_models import GLM, MIXTRAL, OLMOE, PROMPTS, layout_of, stored
from reference import Reference, Tensor
from reference import generate as reference_tokens
from test_node_verbs import HALVES, NODES, owners_of
from test_ranks import MACHINE

T4 = load_machine("t4")
DEVICES = [
    "torch",
    pytest.param("mlx", marks=pytest.mark.skipif(find_spec("mlx") is None, reason="there is no MLX here")),
]


# -- on tensors ------------------------------------------------------------------------------------


class Noting(Reference):
    """Keeps the hidden states that routers read, by step and layer."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.routed: list[list[Tensor]] = []

    def experts(self, layer: int, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        if not layer:
            self.routed.append([])
        self.routed[-1].append(residual_TD)
        return super().experts(layer, x_TD, residual_TD)

    def scores(self, step: int, layer: int, ahead: int) -> tuple[Tensor, Tensor]:
        """The scores of a layer by the hidden states of `ahead` layers before, and the tokens of each expert."""
        config, prefix = self.config, f"layers.{layer}."
        x_TD = functions.norm(
            self.routed[step][layer - ahead], self.weights[prefix + "ffn_norm"], config.norm_eps, config.norm
        )
        shares_TE = (x_TD @ self.weights[prefix + "router"].T).softmax(dim=-1)
        chosen_Tk = shares_TE.topk(config.routed.top_k).indices
        return shares_TE.mean(dim=0), chosen_Tk.flatten().bincount(minlength=config.routed.experts)


def generated(
    checkpoint: Checkpoint, policy: Any, device: str, machine: Machine = ONE_MEMORY, prompts: int = 4
) -> Generated:
    made: Any = plugins.find("devices", device)(
        checkpoint, layout_of(checkpoint.config, "float32"), keep_logits=True
    )
    return generate(made, policy, machine, PROMPTS, new_tokens=3, micro_batch_size=prompts)


@pytest.mark.parametrize("config", [MIXTRAL, OLMOE], ids=lambda config: config.name)
@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_routings_and_previews_are_the_mean_softmax_of_all_experts_in_their_order(
    tmp_path: Path, config: ModelConfig, device: str
) -> None:
    checkpoint, policy = stored(config, tmp_path), Previewing(scores=True)
    tokens = generated(checkpoint, policy, device).tokens
    reference = Noting(tmp_path / config.name)
    assert reference_tokens(reference, PROMPTS, 3)[0] == tokens
    assert {ahead for *_, ahead in policy.seen} == set(range(config.layers))
    for (step, layer, _, ahead), value in policy.seen.items():
        scores_E, counts_E = reference.scores(step, layer, ahead)
        assert torch.allclose(torch.tensor(value.scores), scores_E, atol=1e-5)
        assert sum(value.scores) == pytest.approx(1, abs=1e-5)
        assert dict(value) == {expert: count for expert, count in enumerate(counts_E.tolist()) if count}


@pytest.mark.parametrize(
    ("device", "machine"),
    [("torch", ONE_MEMORY), ("torch", TWO_MEMORIES), pytest.param("mlx", ONE_MEMORY, marks=DEVICES[1].marks)],  # type: ignore[attr-defined]  # of a parameter
    ids=["torch", "torch, two memories", "mlx"],
)
def test_with_and_without_scores_tokens_logits_and_counts_are_the_same(
    tmp_path: Path, device: str, machine: Machine
) -> None:
    checkpoint = stored(MIXTRAL, tmp_path)
    policies = [Previewing(scores=scores) for scores in (False, True)]
    without, with_scores = (generated(checkpoint, each, device, machine, prompts=2) for each in policies)
    assert with_scores.tokens == without.tokens
    assert same_bits(with_scores.logits_RSV, without.logits_RSV)
    assert policies[0].seen == policies[1].seen
    assert not any(isinstance(value, ScoredTokens) for value in policies[0].seen.values())


def test_all_tensor_parallel_ranks_have_the_same_scores(no_text: Path) -> None:
    checkpoint = open_checkpoint(no_text)
    both = parse_machine(MACHINE.encode(), "two accelerators")
    cut, share, _ = cut_over_ranks(checkpoint.config, both, None, 2)
    batch = split_batch([len(prompt) for prompt in PROMPTS], 3, 2)
    policies = [Previewing(scores=True), Previewing(scores=True)]
    with open_devices("torch", {}, checkpoint, weight_layout(cut, "float32")) as devices:
        first, second = (
            Rank(plan_run(share, device.layout, batch, policy, slot_bytes=devices.slot_bytes), policy, device)
            for policy, device in zip(policies, devices.all, strict=True)
        )
        report = run(first.plan, first.policy, first.device, PROMPTS, peers=[second], keep_open=True)
    assert report.tokens == reference_tokens(Reference(no_text), PROMPTS, 3)[0]
    one, other = ({where: value.scores for where, value in policy.seen.items()} for policy in policies)
    assert one == other != {}


def test_a_dense_layer_has_one_score(tmp_path: Path) -> None:
    config = MIXTRAL.varied(name="mixtral", experts=1, top_k=1)
    policy = Previewing(scores=True)
    generated(stored(config, tmp_path), policy, "torch")
    assert {value.scores for value in policy.seen.values()} == {(1.0,)}


class Silent(TorchDevice):
    """A device that gives no scores."""

    gives_scores = False


def test_a_device_without_scores_refuses_a_plan_that_requests_them(tmp_path: Path) -> None:
    checkpoint = stored(MIXTRAL, tmp_path)
    device, policy = (
        Silent(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True),
        Previewing(scores=True),
    )
    says = "device Silent gives no router scores, which policy Previewing requests: use --device torch"
    with pytest.raises(BadInput, match=says):
        generate(device, policy, ONE_MEMORY, PROMPTS, new_tokens=2, micro_batch_size=2)
    asyncio.run(device.aclose())


# -- where nothing is computed ---------------------------------------------------------------------

ONE_BATCH = Case(name="scores", machine=T4, weights=1.5, prompts=(2, 2))


def simulated(policy: Previewing, routing: Any) -> Previewing:
    simulate(ONE_BATCH.plan(policy), policy, routing=routing, preview_accuracy=1.0)
    return policy


def test_on_the_virtual_clock_scores_are_the_shares_of_the_choices() -> None:
    seen = simulated(Previewing(scores=True), SeededRouting(4, 2)).seen
    assert seen
    for value in seen.values():
        choices = sum(value.values())
        assert value.scores == tuple(value.get(expert, 0) / choices for expert in range(4))


class Knowing(SeededRouting):
    """A routing that knows scores."""

    def scores(self, step: int, layer: int, micro_batch: int, tokens: int) -> Sequence[float]:
        return [0.1 * step, 0.1 * layer, 0.1 * micro_batch, 1 - 0.1 * (step + layer + micro_batch)]


def test_a_routing_that_knows_scores_gives_those_of_routings_but_none_of_previews() -> None:
    seen = simulated(Previewing(scores=True), Knowing(4, 2)).seen
    for (step, layer, micro_batch, ahead), value in seen.items():
        known = tuple(Knowing(4, 2).scores(step, layer, micro_batch, 0))
        assert (value.scores == known) == (ahead == 0)


def test_a_forecast_of_nothing_has_equal_scores() -> None:
    policy = Previewing(scores=True)
    plan = ONE_BATCH.plan(policy)
    simulate(plan, policy, routing=SeededRouting(4, 4), preview_accuracy=0.0)
    assert {value.scores for (*_, ahead), value in policy.seen.items() if ahead} == {(0.25,) * 4}


def test_a_policy_with_scores_passes_the_suite_of_policies() -> None:
    assert check_policy(lambda: Previewing(scores=True), [ONE_BATCH]) == 1


@pytest.mark.parametrize("seed", [3, 5])
def test_the_adversary_of_odd_seeds_requests_scores_and_gets_the_tokens_of_all(seed: int) -> None:
    policy = Adversarial(seed)
    plan = ONE_BATCH.plan(policy)
    assert plan.declared.scores
    ended = run_on_symbols(policy, plan)
    assert ended.tokens == ended.expected


# -- nodes -----------------------------------------------------------------------------------------


class ScoringNode(NodeExperts):
    """A node that keeps the scores of every layer."""

    def __init__(self, *, decentralised: bool = True, first: bool = False) -> None:
        super().__init__(decentralised)
        self._first = first
        self.scores: list[tuple[float, ...]] = []

    def plan(self, plan: Plan) -> None:
        if self._first:
            plan.request_scores()
        super().plan(plan)
        plan.request_scores()

    def choose_placement(self, plan: Plan) -> Placement:
        return HALVES

    def run_experts(self, step: Step, i: int, j: int, routed: Mapping[int, int]) -> None:
        assert isinstance(routed, ScoredTokens)
        self.scores.append(routed.scores)
        owners = owners_of(routed)
        step.assign(i, j, owners)
        for expert, node in owners.items():
            if node == step.node:
                step.run_expert(i, expert, j)


def test_every_node_that_routes_has_the_scores() -> None:
    nodes, case = [ScoringNode(), ScoringNode()], node_cases()[0]
    (plan, policy), *peers = [(case.plan(node, number), node) for number, node in enumerate(nodes)]
    ended = run_on_symbols(policy, plan, peers=peers)
    assert ended.tokens == ended.expected
    assert nodes[0].scores == nodes[1].scores != []


@pytest.mark.parametrize("first", [True, False])
def test_a_centralised_plan_cannot_request_scores_which_its_other_nodes_lack(first: bool) -> None:
    verb = "place_experts" if first else "request_scores"
    with pytest.raises(PolicyError, match=f"{verb}: in a centralised plan only the first node has a router"):
        NODES.plan(ScoringNode(decentralised=False, first=first))


# -- what a policy may do with them ----------------------------------------------------------------


def test_a_layer_without_experts_has_empty_scores_as_on_hardware(tmp_path: Path) -> None:
    real, virtual = Previewing(scores=True), Previewing(scores=True)
    generated(stored(GLM, tmp_path), real, "torch")
    simulate(plan_run(T4, weight_layout(GLM), split_batch([2, 2], 2, 2), virtual), virtual)
    for policy in (real, virtual):
        assert {value.scores for (_, layer, _, _), value in policy.seen.items() if layer == 0} == {()}


class Doing(Previewing):
    """Does something with the first routing."""

    def __init__(self, do: Any, *, scores: bool = True) -> None:
        super().__init__(scores=scores)
        self._do = do

    async def prefill(self, step: Step) -> None:
        step.embed(0)
        step.pre_attention(0, 0)
        step.attention(0, 0)
        self._do(await step.route(0, 0))


def change(value: Any) -> None:
    value[0] = 3


def drop(value: Any) -> None:
    value.pop(0)


def assign(value: Any) -> None:
    value.scores = ()


@pytest.mark.parametrize("do", [change, drop, assign], ids=lambda each: each.__name__)
def test_a_value_with_scores_is_read_only(do: Any) -> None:
    with pytest.raises(PolicyError, match=r"copy it first, with dict\(\.\.\.\)"):
        simulated(Doing(do), None)


def test_scores_that_were_not_requested_are_refused_with_the_remedy() -> None:
    with pytest.raises(PolicyError, match=r"requests no router scores: call plan\.request_scores\(\)"):
        simulated(Doing(lambda value: value.scores, scores=False), None)


def test_scores_are_requested_in_the_plan() -> None:
    plan = ONE_BATCH.plan(Previewing())
    with pytest.raises(PolicyError, match=r"request_scores: the plan is made"):
        plan.request_scores()


def test_a_value_with_scores_equals_the_counts_and_shows_both() -> None:
    value = ScoredTokens({1: 3}, [0.25, 0.75])
    assert value == {1: 3}
    assert (len(value), list(value), value[1], value.get(0)) == (1, [1], 3, None)
    assert repr(value) == "ScoredTokens({1: 3}, scores=(0.25, 0.75))"
