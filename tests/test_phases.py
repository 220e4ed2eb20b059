"""Phases of micro-batches: prompts beside decoding in one step, and sequences that end before the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from moesched import plugins
from moesched.devices.torch.device import TorchDevice
from moesched.drivers.policies import scheduled
from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.validation import new_engine, new_shared_engine
from moesched.drivers.virtual import VirtualDriver
from moesched.errors import OutOfOrder
from moesched.machines import load_machine
from moesched.machines.cost import cost_model
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.policies.resident import Resident
from moesched.requests.batch import Batch
from moesched.requests.sampling import Sampling
from moesched.runs.assembly import assemble
from moesched.runs.generation import TokenHandling
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.seams import Device, Policy
from moesched.steps.plan import Plan
from moesched.steps.run_state import RunState
from moesched.steps.step import Step
from moesched.system.own_loop import run_on_own_loop
from moesched.tasks import Collective, Decision, HostKernel, Kernel, PageTransfer, Preview
from moesched.testing import Case, run_on_symbols
from moesched.testing.symbolic.device import SymbolicDevice
from moesched.testing.symbolic.model import expected_tokens
from runs import Ended
from small_models import SMALL, small_model

T4 = load_machine("t4")
SHIPPED = [
    name for name in plugins.names("policies") if not name.startswith("ep_") and name != "flexgen_pipeline"
]
"""Policies of one machine."""
MIXED = ("resident", "adversarial", "expert_streaming", "fastdecode", "layer_split", "twiddler", "moe_gen")
"""Policies whose `decode` takes micro-batches of either phase."""
NEW_TOKENS = 4
LENGTHS = (5, 9, 3, 7)
PROMPTS = [
    [(31 * request + 7 * place) % 256 for place in range(length)] for request, length in enumerate(LENGTHS)
]
BATCH = Batch(LENGTHS, NEW_TOKENS, ((0, 1), (2,), (3,)))
Tokens = dict[int, list[int]]


class Served:
    """Generates the tokens of micro-batches that join a run at different steps, as a server would.

    Args:
        joins: the step that each micro-batch joins at.
        first: whether those that join come before the others in their step.

    Attributes:
        kinds: the kind of each step.
        phases: the phases of its micro-batches.
    """

    def __init__(self, joins: Mapping[int, int], *, first: bool) -> None:
        self._joins = joins
        self._first = first
        self.tokens: Tokens = defaultdict(list)
        self.kinds: list[str] = []
        self.phases: list[dict[int, str]] = []

    async def run(self, state: RunState, policy: Policy) -> None:
        for task in [task for kept in state.plan.weights.resident for task in state.load(kept)]:
            await task
        for task in state.fill():
            await task
        new_tokens = state.plan.batch.new_tokens
        steps = max(self._joins.values()) + new_tokens
        prompts, state.present = state.present, []
        for index in range(steps):
            joining = [batch for batch in prompts if self._joins[batch.whole.index] == index]
            state.present = [*joining, *state.present] if self._first else [*state.present, *joining]
            step = Step(state, index, last=index == steps - 1)
            self.kinds.append(step.kind)
            self.phases.append({j: step.phase(j) for j in step.micro_batches})
            await scheduled(policy, step)
            for requests, sample in step.close():
                for request, token in zip(requests, await sample, strict=True):
                    self.tokens[request].append(token)
            state.leave_out(
                {request for request, each in self.tokens.items() if len(each) == new_tokens}, lambda _: False
            )

    def on_the_virtual_clock(self, plan: Plan, policy: Policy, device: Any) -> Tokens:
        run = assemble(Rank(plan, policy, device), new_engine)
        kinds = (Kernel, HostKernel, PageTransfer, Decision, Preview, Collective)
        cost = cost_model(plan.machine, plan.layout.dtype)
        driver = VirtualDriver([run.engine], cost, perform=dict.fromkeys(kinds, device.execute))
        with closing(run.run_state):
            driver.run(self.run(run.run_state, policy))
        return self.tokens

    def on_threads(self, plan: Plan, policy: Policy, device: Device) -> Tokens:
        run = assemble(Rank(plan, policy, device), new_shared_engine)

        async def main() -> None:
            await RealtimeDriver([run.engine], device.execute).run(self.run(run.run_state, policy))
            await device.aclose()

        with closing(run.run_state):
            run_on_own_loop(main)
        return self.tokens


# ---------------------------------------------------------------- prompts beside decoding


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("first", [True, False])
def test_a_step_holds_prompts_beside_decoding_in_any_order(policy: str, first: bool) -> None:
    scheduler = make_policy(policy)
    plan = Case(name="joining", machine=T4, prompts=LENGTHS, micro_batch_size=1, new_tokens=4).plan(scheduler)
    device = SymbolicDevice()
    device.begin(plan)
    served = Served({0: 0, 1: 1, 2: 1, 3: 3}, first=first)
    tokens = served.on_the_virtual_clock(plan, scheduler, device)
    assert [tokens[request] for request in range(4)] == expected_tokens(plan)
    assert served.kinds == ["prefill", "mixed", "decode", "mixed", "decode", "decode", "decode"]
    assert list(served.phases[1].items()) == (
        [(1, "prefill"), (2, "prefill"), (0, "decode")]
        if first
        else [(0, "decode"), (1, "prefill"), (2, "prefill")]
    )
    assert served.phases[3] == {1: "decode", 2: "decode", 0: "decode", 3: "prefill"}
    assert list(served.phases[6]) == [3]


def test_chunks_of_a_prompt_pass_beside_decoding() -> None:
    policy = make_policy("resident")
    batch = Batch((3, 20), 3, ((0,), (1,)), prefill_chunk=8)
    plan = plan_run(T4, weight_layout(SMALL), batch, policy)
    device = SymbolicDevice()
    device.begin(plan)
    served = Served({0: 0, 1: 1}, first=False)
    tokens = served.on_the_virtual_clock(plan, policy, device)
    assert [tokens[0], tokens[1]] == expected_tokens(plan)
    assert list(served.phases[1].values()) == ["decode", "prefill", "prefill", "prefill"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(small_model(tmp_path_factory.mktemp("models") / "small"))


def logits_by_request(device: TorchDevice) -> dict[int, list[torch.Tensor]]:
    found = defaultdict(list)
    for requests, logits_SV in device.logits:
        for request, logits_V in zip(requests, logits_SV, strict=True):
            found[request].append(logits_V)
    return found


def generated(
    checkpoint: Checkpoint,
    policy: str,
    batch: Batch,
    prompts: Sequence[Sequence[int]],
    dtype: str,
    joins: Any,
) -> tuple[Tokens, dict[int, list[torch.Tensor]]]:
    """Tokens and logits of real kernels on the CPU, in real time."""
    scheduler, layout = make_policy(policy), weight_layout(checkpoint.config, dtype)
    device = TorchDevice(checkpoint, layout, keep_logits=True)
    plan = plan_run(T4, layout, batch, scheduler, slot_bytes=device.slot_bytes)
    plan.check()
    device.begin(plan, prompts, Sampling())
    tokens = Served(joins, first=True).on_threads(plan, scheduler, device)
    return tokens, logits_by_request(device)


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("resident", "float32"),
        ("twiddler", "bfloat16"),
        ("adversarial", "bfloat16"),
        ("fastdecode", "float32"),
    ],
)
def test_real_kernels_give_joining_sequences_the_bits_that_each_micro_batch_has_alone(
    checkpoint: Checkpoint, policy: str, dtype: str
) -> None:
    tokens, logits = generated(checkpoint, policy, BATCH, PROMPTS, dtype, {0: 0, 1: 1, 2: 2})
    for requests in BATCH.micro_batches:
        prompts = [PROMPTS[request] for request in requests]
        lengths = tuple(map(len, prompts))
        alone = Batch(lengths, NEW_TOKENS, (tuple(range(len(prompts))),))
        own, own_logits = generated(checkpoint, "resident", alone, prompts, dtype, {0: 0})
        for place, request in enumerate(requests):
            assert tokens[request] == own[place]
            assert all(map(torch.equal, logits[request], own_logits[place]))


# ---------------------------------------------------------------- sequences that end


def test_a_micro_batch_whose_sequences_have_ended_takes_no_part_in_later_steps() -> None:
    policy = make_policy("cgopipe")
    plan = Case(name="ending", machine=T4, prompts=LENGTHS, micro_batch_size=1, new_tokens=6).plan(policy)
    stop = expected_tokens(plan)[2][1]
    ended = run_on_symbols(policy, plan, stop_tokens={stop})
    assert ended.tokens == ended.expected
    assert list(map(len, ended.tokens)) == [6, 6, 2, 6]
    steps = {j: {task.step for task in ended.tasks if task.micro_batch == j} for j in plan.micro_batches}
    assert steps[2] == {0, 1, 2}  # the third was submitted before the second had its tokens
    assert steps[0] == steps[1] == steps[3] == set(range(6))


class Insisting(Resident):
    """Schedules all micro-batches of the plan in every step."""

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.numbers = plan.micro_batches

    async def decode(self, step: Step) -> None:
        for j in set(self.numbers) - set(step.micro_batches):
            step.embed(j)
        await super().decode(step)


def test_a_verb_for_a_micro_batch_that_has_ended_is_refused_with_a_remedy() -> None:
    policy = Insisting()
    plan = Case(name="insisting", machine=T4, micro_batch_size=2, new_tokens=6, weights=2.0).plan(policy)
    stops = {expected_tokens(plan)[request][1] for request in plan.batch.micro_batches[0]}
    message = "embed: there is no mb0 in this step: its sequences have ended, .*loop over step.micro_batches"
    with pytest.raises(OutOfOrder, match=message):
        run_on_symbols(policy, plan, stop_tokens=stops)


BATCHES = ((0, 1, 2), (3,))


def run_until(
    checkpoint: Checkpoint, policy: str, stops: Collection[int], dtype: str
) -> tuple[list[list[int]], dict[int, list[torch.Tensor]], dict[int, list[int]]]:
    """Tokens and logits by request, and rows by micro-batch, of real kernels with these stop tokens."""
    scheduler, layout, seen = make_policy(policy), weight_layout(checkpoint.config, dtype), Ended()
    device = TorchDevice(checkpoint, layout, keep_logits=True)
    plan = plan_run(T4, layout, Batch(LENGTHS, 8, BATCHES), scheduler, slot_bytes=device.slot_bytes)
    report = run(plan, scheduler, device, PROMPTS, tokens=TokenHandling(stops), observers=[seen])
    assert report.tokens is not None
    rows = defaultdict(list)
    for task in seen.tasks:
        if (task.verb, task.layer, task.phase) == ("pre_attention", 0, "decode"):
            rows[task.micro_batch].append(task.work.tokens)
    return report.tokens, logits_by_request(device), rows


@pytest.mark.parametrize("policy", SHIPPED)
def test_a_sequence_that_has_ended_leaves_its_micro_batch_and_no_other_ones_bits_change(
    checkpoint: Checkpoint, policy: str
) -> None:
    tokens, logits, _ = run_until(checkpoint, "resident", (), "bfloat16")
    stop = tokens[1][1]
    assert not any(stop in tokens[request] for request in (0, 2, 3))
    ended, own, rows = run_until(checkpoint, policy, {stop}, "bfloat16")
    assert ended == [tokens[0], tokens[1][:2], tokens[2], tokens[3]]
    for request in (0, 2, 3):
        assert all(map(torch.equal, own[request], logits[request]))
    assert rows == {0: [3, 3, 2, 2, 2, 2, 2], 1: [1] * 7}
    assert len(own[1]) == 3


def test_where_bits_depend_on_the_other_rows_a_sequence_stays_until_its_micro_batch_ends(
    checkpoint: Checkpoint,
) -> None:
    tokens, logits, _ = run_until(checkpoint, "resident", (), "float32")
    ended, own, rows = run_until(checkpoint, "resident", {tokens[1][1], *tokens[3][1:2]}, "float32")
    assert list(map(len, ended))[1] == 2
    assert rows[0] == [3] * 7
    assert len(rows[1]) == 2
    assert all(map(torch.equal, own[0], logits[0]))
