"""Requests for tests of serving, the devices that serve them, and the tokens that each has alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest

from benchmarks.shared.small_runs import ONE_MEMORY
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.machines import Machine, load_machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import Batch
from moesched.requests.sampling import Sampling
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.serving import Serving
from moesched.seams import Device, Policy
from moesched.serving.capacity import Capacity
from moesched.serving.request import Request
from moesched.steps.plan import Plan
from moesched.testing.served_checks import random_requests
from small_models import SMALL

CAPACITY = Capacity(2, 3, 6 * 16, 24, 32)
LAYOUT = weight_layout(SMALL, "float32")
T4 = load_machine("t4")


def request(number: int, prompt: int = 4, new_tokens: int = 3, arrives: int = 0) -> Request:
    return Request(number=number, prompt=prompt, new_tokens=new_tokens, arrives=arrives)


def asked(count: int, seed: int = 1) -> list[Request]:
    """Requests with random prompts, every third one sampled."""
    return [
        Request(
            number=each.number,
            prompt=each.prompt,
            new_tokens=each.new_tokens,
            arrives=each.arrives,
            ids=[(31 * each.number + 7 * place) % 256 for place in range(each.prompt)],
            sampling=Sampling(temperature=0.9 if each.number % 3 == 0 else 0.0, seed=each.number),
        )
        for each in random_requests(seed, 20, 8, count)
    ]


def planned(
    policy: Policy, capacity: Capacity = CAPACITY, device: Device | None = None, machine: Machine = T4
) -> Plan:
    """A plan with as little fast memory as the policy accepts, of a few sizes."""
    whole = sum(page.nbytes for page in LAYOUT.pages)
    batch, slot_bytes = capacity.fullest(), None if device is None else device.slot_bytes
    for share in (1.1, 1.4, 1.7):
        budgets = {machine.accelerator.memory: int(whole * share)}
        try:
            return plan_run(machine, LAYOUT, batch, policy, budgets, slot_bytes)
        except BadInput:
            continue
    return plan_run(machine, LAYOUT, batch, policy)


def tokens_alone(checkpoint: Checkpoint, requests: Iterable[Request]) -> dict[int, list[int]]:
    """The tokens of each request that runs alone on one machine."""
    tokens = {}
    for each in requests:
        policy, device = make_policy("resident"), torch_device(checkpoint)
        plan = plan_run(ONE_MEMORY, LAYOUT, Batch((each.prompt,), each.new_tokens, ((0,),)), policy)
        report = run(plan, policy, device, [list(each.ids or ())], sampling=each.sampling)
        assert report.tokens is not None
        tokens[each.number] = report.tokens[0]
    return tokens


def stop_of(alone: Mapping[int, Sequence[int]]) -> int:
    """A token that ends one of the requests one token early."""
    return next(tokens[-2] for tokens in alone.values() if len(tokens) > 3)


def assert_as_alone(serving: Serving, alone: Mapping[int, Sequence[int]], stop: int) -> None:
    """Assert that each request got the tokens that it has alone, up to a stop token, and that no block is held."""
    for number, served in serving.requests.items():
        whole = alone[number]
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert served.tokens == whole[:end][: len(served.tokens)]
        assert served.ending == "left" or len(served.tokens) == end
    assert serving.held == serving.running == 0


def torch_device(checkpoint: Checkpoint) -> Device:
    """A device on the CPU."""
    return TorchDevice(checkpoint, weight_layout(checkpoint.config, "float32"))


def mlx_device(checkpoint: Checkpoint) -> Device:
    """A device of MLX; the test is skipped without it."""
    pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    from moesched.devices.mlx.device import MlxDevice

    return MlxDevice(checkpoint, weight_layout(checkpoint.config, "float32"))
