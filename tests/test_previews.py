"""Previews of the router: what they say, and transfers that are withdrawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES, generate
from moesched.devices.torch.device import TorchDevice
from moesched.errors import NotResident, OutOfOrder, PolicyError
from moesched.machines import Machine, load_machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.routing import SeededRouting
from moesched.routing.router_forecast import RouterForecast
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import CANCELLED
from moesched.testing import Case, run_on_symbols
from moesched.testing.previewing import Previewing
from odd_models import MIXTRAL, PROMPTS

# -- where nothing is computed -------------------------------------------------------------------------------------


def share_foretold(accuracy: float, tokens: int = 1, ahead: int = 1) -> float:
    """The share of the routed experts that previews name, of 128 with 8 for each token."""
    routing = SeededRouting(128, 8)
    previews = RouterForecast(routing, 128, accuracy)
    chosen = [set(routing.choose(step, 0, 0, tokens)) for step in range(300)]
    foretold = [set(previews.choose(step, 0, 0, tokens, ahead)) for step in range(300)]
    assert [len(each) for each in foretold] == [len(each) for each in chosen]
    return sum(len(one & other) for one, other in zip(chosen, foretold, strict=True)) / sum(map(len, chosen))


@pytest.mark.parametrize(("accuracy", "least", "most"), [(1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.8, 0.77, 0.83)])
def test_previews_name_so_many_of_the_experts_that_will_be_chosen(
    accuracy: float, least: float, most: float
) -> None:
    assert least <= share_foretold(accuracy) <= most
    assert least <= share_foretold(accuracy, tokens=3) <= most


@pytest.mark.parametrize("ahead", [2, 3])
def test_each_layer_ahead_multiplies_the_accuracy(ahead: int) -> None:
    assert share_foretold(0.8, tokens=3, ahead=ahead) == pytest.approx(0.8**ahead, abs=0.04)
    assert share_foretold(1.0, ahead=ahead) == 1.0


def test_an_expert_that_is_mistaken_is_so_from_further_ahead() -> None:
    routing = SeededRouting(128, 8)
    previews = RouterForecast(routing, 128, 0.8)
    for step in range(50):
        chosen = set(routing.choose(step, 0, 0, 1))
        near, far = (chosen & set(previews.choose(step, 0, 0, 1, ahead)) for ahead in (1, 3))
        assert far <= near


def test_the_same_seed_foretells_the_same() -> None:
    def foretold(seed: int) -> list[dict[int, int]]:
        previews = RouterForecast(SeededRouting(8, 2), 8, 0.5, seed)
        return [previews.choose(step, 1, 0, 2) for step in range(20)]

    assert foretold(1) == foretold(1) != foretold(2)


def test_where_every_expert_is_chosen_a_mistake_leaves_one_out() -> None:
    foretold = RouterForecast(SeededRouting(4, 4), 4, 0.0).choose(0, 0, 0, 9)
    assert foretold == {}


def test_the_commands_accuracy_decides_how_much_is_fetched_in_vain(command: Any) -> None:
    def moved(accuracy: float) -> Any:
        said = command(
            "simulate", "--model", "mixtral-0.8b", "--machine", "t4", "--policy", "prefetch_gate", "--workload",
            "mtbench", "--gen", 6, "--batch-size", 1, "--budget", "gpu=700MB", "--preview-accuracy", accuracy, "--json",
        )  # fmt: skip
        assert said.code == 0, said.err
        return said.json["lanes"]["host->gpu"]["busy_seconds"]

    assert moved(1.0) < moved(0.0)


# -- on tensors ----------------------------------------------------------------------------------------------------


def previews_of(directory: Path, machine: Machine) -> Previewing:
    checkpoint = open_checkpoint(directory)
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config, "float32"), keep_logits=True)
    policy = Previewing()
    generate(device, policy, machine, PROMPTS, new_tokens=3, micro_batch_size=2)
    return policy


@pytest.mark.parametrize("machine", [ONE_MEMORY, TWO_MEMORIES], ids=["one memory", "two memories"])
def test_where_layers_change_nothing_previews_are_what_the_router_chooses(
    tmp_path: Path, machine: Machine
) -> None:
    model = write_random_model(MIXTRAL, tmp_path / "model", seed=3, dtype="float32")
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        silent = {
            name: torch.zeros_like(each)
            for name, each in tensors.items()
            if "o_proj" in name or ".w2." in name
        }
        assert silent
        save_file(tensors | silent, file, metadata={"format": "pt"})
    policy = previews_of(model, machine)
    for ahead in (1, 2):
        foretold = policy.foretold(ahead)
        assert {layer for _, layer, _ in foretold} == set(range(ahead, 3))
        assert foretold == {where: policy.chosen[where] for where in foretold}


def test_in_other_models_previews_are_guesses(tmp_path: Path) -> None:
    model = write_random_model(MIXTRAL, tmp_path / "model", seed=3, dtype="float32")
    policies = [previews_of(model, machine) for machine in (ONE_MEMORY, TWO_MEMORIES)]
    assert policies[0].seen == policies[1].seen
    chosen = policies[0].chosen
    for ahead in (1, 2):
        foretold = policies[0].foretold(ahead)
        assert foretold != {where: chosen[where] for where in foretold}
        rows = [sum(counts.values()) for counts in foretold.values()]
        assert rows == [sum(chosen[where].values()) for where in foretold]


# -- verbs ---------------------------------------------------------------------------------------------------------


class Trying(Previewing):
    """Calls something in the first layer of prefill, once the micro-batch is routed."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        self.spare = plan.layout.layer(2)
        plan.keep([page for i in (0, 1) for page in plan.layout.layer(i)])
        self.pool = plan.pool("accelerator", "pool", len(self.spare), self.spare, "none")
        self.back = plan.pool("host", "back", 1, self.spare)

    async def prefill(self, step: Step) -> None:
        if not step.index:
            for j in step.micro_batches:
                step.embed(j)
            step.pre_attention(0, 0)
            step.attention(0, 0)
            await step.route(0, 0)
            await self._call(step, self)
            raise Enough

    decode = prefill


class Enough(Exception):
    """The call went well."""


def tried(call: Any) -> None:
    """A run that makes a call."""
    policy = Trying(call)
    plan = Case(name="verbs", machine=load_machine("t4"), weights=1.5).plan(policy)
    with pytest.raises(Enough):
        run_on_symbols(policy, plan)


@pytest.mark.parametrize(
    ("layer", "j", "error", "says"),
    [
        (1, 1, OutOfOrder, "needs mb1 at step 0 routed in a layer before L1, but it is at step 0 L0 input"),
        (0, 0, OutOfOrder, "needs mb0 at step 0 routed in a layer before L0, but it is at step 0 L0 routed"),
        (3, 0, OutOfOrder, "preview_route: the model has no L3: its layers are L0 to L2"),
        (-1, 0, OutOfOrder, "preview_route: the model has no L-1: its layers are L0 to L2"),
        (1, [0], OutOfOrder, r"preview_route: there is no micro-batch \[0\] in this step"),
        (2, 0, NotResident, "page L2 dense #0 is not in gpu: fetch it before the kernel that reads it"),
    ],
)
def test_only_later_layers_whose_dense_pages_are_there_can_be_previewed(
    layer: int, j: Any, error: type[PolicyError], says: str
) -> None:
    async def call(step: Step, policy: Trying) -> None:
        step.preview_route(layer, j)

    with pytest.raises(error, match=says) as caught:
        tried(call)
    assert any(Path(entry.path) == Path(__file__) and entry.name == "call" for entry in caught.traceback)


def test_a_layer_of_another_stage_of_a_pipeline_cannot_be_previewed() -> None:
    class Piped(Previewing):
        pipelines = True

        def plan(self, plan: Plan) -> None:
            plan.place_kv("accelerator")
            for layers in plan.stages:
                plan.keep([page for i in layers for page in plan.layout.layer(i)])

    piped = Piped(farthest=1)
    plan = Case(name="piped", machine=load_machine("t4x2"), layers=5, weights=1.5).plan(piped)
    says = (
        "preview_route: L3 is in stage 1 of the pipeline, and mb0 in stage 0, whose accelerator does not have"
    )
    with pytest.raises(PolicyError, match=says):
        run_on_symbols(piped, plan)


def test_a_transfer_that_has_not_started_can_be_cancelled_and_its_slots_are_free() -> None:
    async def call(step: Step, policy: Trying) -> None:
        first, second, *_ = policy.spare
        running, waiting = (step.fetch([page], policy.pool) for page in (first, second))
        empty = policy.pool.empty_slots
        assert step.cancel([second], policy.pool)
        assert waiting.state == CANCELLED
        assert policy.pool.empty_slots == empty + 1
        assert not step.cancel([first], policy.pool), "it is under way"
        assert first in policy.pool
        await step.fetch([second], policy.pool)
        assert running.end > 0

    tried(call)


def test_a_lifted_transfer_overtakes_those_that_were_submitted_before() -> None:
    async def call(step: Step, policy: Trying) -> None:
        fetches = [step.fetch([page], policy.pool, speculative=True) for page in policy.spare[:3]]
        step.promote([policy.spare[2]], policy.pool)
        for fetch in fetches:
            await fetch
        assert fetches[0].end == fetches[2].start < fetches[1].start

    tried(call)


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        ("absent", NotResident, "cancel: page L2 dense #0 is not in pool pool"),
        ("half", PolicyError, "cancel: these pages are not what one fetch brings"),
        ("used", PolicyError, "cancel: page L2 dense #0 is used by a task that was submitted"),
    ],
)
def test_what_cannot_be_cancelled_is_refused(damage: str, error: type[PolicyError], says: str) -> None:
    async def call(step: Step, policy: Trying) -> None:
        busy, *pages = reversed(policy.spare)
        first = pages[-1]
        step.fetch([busy], policy.pool)
        if damage == "half":
            step.fetch([first, pages[0]], policy.pool)
        elif damage == "used":
            step.fetch([first], policy.pool)
            step.fetch([first], policy.back, source=policy.pool)
        step.cancel([first], policy.pool)

    with pytest.raises(error, match=says):
        tried(call)
