"""The conformance suite of devices: real runs of a small random model, batch after batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import isclose
from pathlib import Path
from typing import get_args

import numpy as np

from moesched import plugins
from moesched.errors import BadInput, MoeschedError, WrongValue
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.kv_blocks import KV_BLOCK_TOKENS
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.routing import ScoredTokens
from moesched.runs.device_values import checked_rows, checked_slot_bytes
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import simulate_serving
from moesched.seams import CountsReads, Device, GivesScores, KeepsTime, LaneKind, Serves
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.capacity import Capacity
from moesched.serving.request import Request
from moesched.steps.plan import Plan
from moesched.system.own_loop import run_on_own_loop
from moesched.system.scratch import scratch_folder
from moesched.tasks import Task
from moesched.testing.asserts import require_asserts
from moesched.testing.policy_checks import Case
from moesched.testing.previewing import Previewing
from moesched.trace import LaneName, Recorder, Recording

Make = Callable[[Checkpoint, WeightLayout], Device]

PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5], [60]]
NEW_TOKENS = 3
LIKELIEST, DRAWN = Sampling(), Sampling(temperature=2.0, seed=7)
POLICIES = (
    "resident",
    "layer_streaming",
    "cgopipe",
    "expert_streaming",
    "moesched.testing.random_rows:RandomRows",
)


def check_device(make: Make, machine: Machine, policies: Iterable[str] = ()) -> list[list[int]]:
    """Check that a device keeps the promises of `moesched.seams.Device`: run a small random model on it.

    Return the tokens by request, which are equal to those of the device `torch`.

    Args:
        make: creates the device, such as its class.
        machine: the machine to plan for; the device must accept plans for it.
        policies: names of policies to run; by default four that keep and stream different weights, and one whose expert
            tasks compute a part of a micro-batch's rows, or the rows of several micro-batches.

    Raises:
        AssertionError: the tokens differ from those of the device `torch`, with greedy or random sampling; or they
            depend on the policy, on the previous batch, or on requests that join and leave; or a verb returned a wrong
            value, two tasks of one lane ran at the same time, or the device broke another promise.
    """
    require_asserts("check_device")
    config = Case(name="a device's", machine=machine).config()
    outcomes: dict[str, list[list[int]]] = {}
    with scratch_folder() as folder:
        checkpoint = write_decisive_model(config, folder / "model")
        _check_unused(make(checkpoint, weight_layout(config, "float32")))
        for outside in (-1, config.vocabulary):
            _check_bad_prompts(make(checkpoint, weight_layout(config, "float32")), machine, outside)
        for name in policies or POLICIES:
            outcomes[name] = _tokens(make(checkpoint, weight_layout(config, "float32")), machine, name)
        scoring = make(checkpoint, weight_layout(config, "float32"))
        if isinstance(scoring, GivesScores) and scoring.gives_scores:
            outcomes["a policy with scores"] = _tokens(scoring, machine, None)
        else:
            run_on_own_loop(scoring.aclose)
        served = _served_tokens(make(checkpoint, weight_layout(config, "float32")), machine)
        drawn = _tokens(make(checkpoint, weight_layout(config, "float32")), machine, "resident", DRAWN)
        torch = plugins.find("devices", "torch")
        expected, expected_draws = (
            _tokens(torch(checkpoint, weight_layout(config, "float32")), machine, "resident", sampling)
            for sampling in (LIKELIEST, DRAWN)
        )
    first, *others = outcomes.items()
    for name, tokens in others:
        assert tokens == first[1], f"{name} does not give the tokens of {first[0]}"
    assert first[1] == expected, f"the tokens are {first[1]}, and those of the device torch {expected}"
    assert served in (None, expected), (
        f"of requests that join and leave the tokens are {served}, and those of the device torch {expected}"
    )
    assert drawn == expected_draws, (
        f"with {DRAWN} the tokens are {drawn}, and those of torch {expected_draws}"
    )
    return expected


def write_decisive_model(config: ModelConfig, folder: Path) -> Checkpoint:
    """Write a random float32 model to a folder, and open it.

    The values of its matrices are multiplied by ten, so that a wrong weight or activation changes the sampled tokens.
    """
    for stored in open_checkpoint(write_random_model(config, folder, dtype="float32")).tensors.values():
        if len(stored.shape) > 1:
            matrix = np.memmap(stored.file, np.float32, "r+", stored.offset, stored.shape)
            matrix *= 10
            matrix.flush()
    return open_checkpoint(folder)


def _check_unused(device: Device) -> None:
    """Check that `slot_bytes` gives a constant, valid size for each page, and that an unused device can be closed."""
    with _promised(BadInput):
        for page in device.layout.pages:
            size = checked_slot_bytes(device, page)
            assert size == device.slot_bytes(page), "slot_bytes is not constant"
    run_on_own_loop(device.aclose)


def _check_bad_prompts(device: Device, machine: Machine, outside: int) -> None:
    policy = plugins.make_policy("resident")
    plan = plan_run(machine, device.layout, split_batch([1], 1, 1), policy, slot_bytes=device.slot_bytes)
    try:
        run(plan, policy, device, [[outside]])
    except BadInput:
        return
    raise AssertionError(f"begin takes the token id {outside}, which is outside the vocabulary")


def _tokens(
    device: Device, machine: Machine, name: str | None, sampling: Sampling = LIKELIEST
) -> list[list[int]]:
    """Run a policy on a device for two equal batches, check both runs, and return the tokens by request.

    Args:
        name: name of the policy; None for the policy `Previewing` with router scores.
    """
    unknown = set(device.kinds.values()) - set(get_args(LaneKind))
    assert not unknown, f"lanes are of unknown kinds: {unknown}"
    batch = split_batch([len(prompt) for prompt in PROMPTS], NEW_TOKENS, 2)
    found = []
    for last in (False, True):
        before = device.bytes_read if isinstance(device, CountsReads) else 0
        policy, recorder = plugins.make_policy(name) if name else Previewing(scores=True), Recorder()
        plan = plan_run(machine, device.layout, batch, policy, slot_bytes=device.slot_bytes)
        values = _Values(type(device).__name__, plan)
        with _promised(WrongValue), values:
            report = run(
                plan,
                policy,
                device,
                PROMPTS,
                sampling=sampling,
                recorder=recorder,
                observers=[values],
                keep_open=not last,
            )
        found.append(report.tokens or [])
        _check_lanes(type(policy).__name__, recorder.recording())
        if isinstance(device, CountsReads):
            assert device.bytes_read >= before, "bytes_read went back"
        if isinstance(device, KeepsTime):
            now = device.clock()
            assert device.clock() >= now, "the clock went back"
    assert found[0] == found[1], f"{type(policy).__name__}: the tokens of a batch depend on the batch before"
    return found[1]


def _served_tokens(device: Device, machine: Machine) -> list[list[int]] | None:
    """Serve requests of which two run at a time, and return the tokens by request; None on a device without serving."""
    if not isinstance(device, Serves):
        run_on_own_loop(device.aclose)
        return None
    capacity = Capacity(2, 1, 2 * KV_BLOCK_TOKENS, max(map(len, PROMPTS)), 2 * KV_BLOCK_TOKENS)
    policy = plugins.make_policy("resident")
    plan = plan_run(machine, device.layout, capacity.fullest(), policy, slot_bytes=device.slot_bytes)
    requests = [
        Request(number=number, prompt=len(ids), new_tokens=NEW_TOKENS, arrives=0, ids=ids)
        for number, ids in enumerate(PROMPTS)
    ]
    try:
        serving = simulate_serving(
            ServingSetup(plan, policy, capacity, ListedArrivals(requests)), device=device
        )
    finally:
        run_on_own_loop(device.aclose)
    return [list(serving.requests[number].tokens) for number in range(len(PROMPTS))]


@contextmanager
def _promised(refusal: type[MoeschedError]) -> Iterator[None]:
    """Context manager that raises errors of type `refusal`, which a device's wrong value caused, as AssertionErrors."""
    try:
        yield
    except refusal as wrong:
        raise AssertionError(str(wrong)) from wrong


class _Values:
    """Observer that collects a run's router tasks, and at the end checks the rows and scores that these tasks returned.

    A run that failed is checked, too: a wrong value may be the reason.

    device: name of the device's class.
    """

    def __init__(self, device: str, plan: Plan) -> None:
        self._device = device
        self._plan = plan
        self._tasks: list[Task] = []

    def ended(self, task: Task) -> None:
        """Keep a finished task of a router."""
        if task.verb in ("route", "preview_route", "post_attention"):
            self._tasks.append(task)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        """Check that routers give top-k rows to each token, and scores that sum to 1 where the plan requests them."""
        batch, top_k = self._plan.batch, self._plan.layout.config.routed.top_k
        for task in (each for each in self._tasks if each.cause is None):
            scored = self._plan.declared.scores and task.verb != "post_attention"
            value = checked_rows(self._device, self._plan, task, task.value, scored=scored)
            tokens = sum(
                1 if task.phase == "decode" else batch.prompts[request]
                for request in batch.micro_batches[task.micro_batch]
            )
            rows = sum(value.values())
            assert rows == tokens * top_k, f"{task.label} gives {rows} rows to {tokens} tokens"
            if isinstance(value, ScoredTokens):
                assert min(value.scores) >= 0 and isclose(sum(value.scores), 1, abs_tol=1e-4), (
                    f"{task.label}: scores are {value.scores}"
                )


def _check_lanes(name: str, recording: Recording) -> None:
    """Check that no two tasks of one lane (queue of tasks) ran at the same time."""
    ends: dict[LaneName, int] = {}
    for each in sorted(recording.slices, key=lambda each: each.start):
        before = ends.get(each.lane, 0)
        assert before <= each.start <= each.end, (
            f"{name}: {each.task.label} ran beside another task of {each.lane}"
        )
        ends[each.lane] = each.end
