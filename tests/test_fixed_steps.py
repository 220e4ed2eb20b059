"""Fixed decode steps: one graph launches a whole step, and whatever a task then does has the bits of its own calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.shared.small_runs import TWO_MEMORIES
from moesched.devices.kernels.workspace import Workspace
from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.torch.captured import WARM_CALLS, Graphs
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.fixed_steps import Replays
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from odd_models import PROMPTS, WIDE, stored

LAYERS = 2
OPERATIONS = ("embed", *("attention_inputs", "attention", "moe_layer") * LAYERS)
FIRST_AHEAD = 2
"""The step that is launched ahead first: the one before it was recorded."""


class Steps:
    """Decode steps of kernels whose layers overwrite each other's results, and the numbers that they should give."""

    def __init__(self, replays: Replays, scratch: torch.Tensor | None = None) -> None:
        self.memory = Workspace(1)
        self.given, self.hidden = (torch.zeros(3, device=GPU_DEVICE) for _ in range(2))
        self._inner = torch.zeros(3, device=GPU_DEVICE) if scratch is None else scratch
        kernels = {
            "embed": lambda _: self.hidden.copy_(self.given),
            "attention_inputs": lambda factor: self._inner.copy_(self.hidden).mul_(factor),
            "attention": lambda factor: self._inner.add_(factor),
            "moe_layer": lambda factor: self.hidden.add_(self._inner).remainder_(101 + factor),
        }
        self._calls = {name: replays.captured(run, name, self.memory) for name, run in kernels.items()}
        self._expected = [0, 0]

    def begin(self, number: int) -> None:
        """Begin a step on a number."""
        self.given.fill_(number)
        self._expected[0] = number

    def call(self, place: int, factor: int | None = None) -> None:
        """Make the call at a place of the step, which depends on a factor."""
        name, factor = OPERATIONS[place], place if factor is None else factor
        self._calls[name](factor)
        hidden, inner = self._expected
        match name:
            case "attention_inputs":
                self._expected[1] = hidden * factor
            case "attention":
                self._expected[1] = inner + factor
            case "moe_layer":
                self._expected[0] = (hidden + inner) % (101 + factor)

    def check(self) -> None:
        """Check the hidden states, as they are after the last call."""
        assert self.hidden.tolist() == [self._expected[0]] * 3

    def run(self, number: int) -> None:
        """Run a whole step."""
        self.begin(number)
        for place in range(len(OPERATIONS)):
            self.call(place)
        self.check()


@pytest.fixture
def replays(gpu: LaggingGpu) -> Replays:
    replays = Replays(Graphs(GPU_DEVICE))
    replays.layers = LAYERS
    return replays


def test_a_step_that_repeats_is_one_replay_on_its_own_numbers(gpu: LaggingGpu, replays: Replays) -> None:
    steps = Steps(replays)
    for number in range(FIRST_AHEAD + WARM_CALLS - 1):
        steps.run(number)
    assert gpu.streams.replays == 0
    before = gpu.operations.calls.copy()
    for number in range(5):
        steps.run(10 * number)
        assert gpu.streams.replays == number + 1
    assert gpu.operations.calls["add_"] == before["add_"], "nothing is launched"
    assert replays.graphs.used == {"replay": ["CUDA graphs of steps"]}


@pytest.mark.parametrize("other", range(len(OPERATIONS)))
def test_a_task_that_makes_another_call_has_the_results_of_its_own_step(replays: Replays, other: int) -> None:
    steps = Steps(replays)
    for number in range(9):
        steps.begin(number)
        for place in range(len(OPERATIONS)):
            steps.call(place, 50 if number in (1, 4, 7) and place == other else None)
        steps.check()


def test_micro_batches_whose_tasks_take_turns_share_what_no_other_task_reads(replays: Replays) -> None:
    scratch = torch.zeros(3, device=GPU_DEVICE)
    both = Steps(replays, scratch), Steps(replays, scratch)
    for steps in both:
        for number in range(4):
            steps.run(number)
    for number in range(3):
        for shift, steps in enumerate(both):
            steps.begin(7 * number + shift)
        for place in range(len(OPERATIONS)):
            for steps in both:
                steps.call(place)
        for steps in both:
            steps.check()


def test_a_step_that_computes_something_else_in_between_is_replayed_task_by_task(replays: Replays) -> None:
    steps = Steps(replays)
    for number in range(6):
        steps.begin(number)
        for place, name in enumerate(OPERATIONS):
            if name != "attention":
                steps.call(place)
        steps.check()
    assert replays.graphs.used == {"replay": ["CUDA graphs"]}


MODEL = WIDE.varied(name="aligned", layers=3, heads=4, kv_heads=2, head_dim=24)


class TwoWays:
    """All weights stay. In some steps a layer runs expert by expert, and the next one is previewed.

    Attributes:
        previews: the values of all previews.
    """

    def __init__(self) -> None:
        self.previews: list[object] = []

    def plan(self, plan: Plan) -> None:
        make_policy("resident").plan(plan)

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                step.pre_attention(i, j)
                step.attention(i, j)
                if step.index in (2, 6, 9) and i == 1:
                    await self._expert_by_expert(step, i, j)
                    continue
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    async def _expert_by_expert(self, step: Step, i: int, j: int) -> None:
        routing = step.route(i, j)
        self.previews.append(await step.preview_route(i + 1, j))
        for expert in await routing:
            step.run_expert(i, expert, j)
        step.combine(i, j)

    decode = prefill


def test_a_policy_may_leave_its_steps_whenever_it_wants(tmp_path: Path) -> None:
    checkpoint, layout = stored(MODEL, tmp_path), weight_layout(MODEL, "float32")

    def ran(device: TorchDevice) -> tuple[object, object]:
        policy = TwoWays()
        batch = split_batch([len(prompt) for prompt in PROMPTS], 11, 2)
        plan = plan_run(TWO_MEMORIES, layout, batch, policy, None, device.slot_bytes)
        report = run(plan, policy, device, PROMPTS, sampling=Sampling(temperature=0))
        return report.tokens, policy.previews

    gpu = LaggingGpu(seed=3)
    device = LaggingDevice(checkpoint, layout, gpu=gpu, triton=True)
    assert ran(device) == ran(TorchDevice(checkpoint, layout, kernel="torch"))
    assert "CUDA graphs of steps" in device.kernels["replay"]
