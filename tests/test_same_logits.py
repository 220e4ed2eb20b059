"""Policies give the same logits, to the bit: with one memory or two, on threads, on streams, on the emulated device."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from functools import cache, partial
from itertools import cycle

import pytest

from benchmarks.shared.equal_bits import EXPERTS, SCHEDULES, SLOW_CPU, EqualRun, Grid, Model, Way
from benchmarks.shared.small_runs import ONE_MEMORY, THREE_TIERS, TWO_MEMORIES, generate, same_bits
from moesched.devices.emulated.device import EmulatedDevice
from moesched.devices.torch.device import TorchDevice
from moesched.machines import Machine
from moesched.plugins import make_policy
from odd_models import PROMPTS, Reference, name_of
from odd_runs import kv_caches, one_batch
from runs import Ended

MODELS = SCHEDULES.models
EMULATED = Way("emulated", partial(EmulatedDevice, dilation=2.0), SLOW_CPU)
RANDOM_ROWS = [("moesched.testing.random_rows:RandomRows", {"seed": seed}) for seed in range(5)]
RUNS = [
    *SCHEDULES.in_turn(),
    *EXPERTS.in_turn(),
    *EXPERTS._replace(policies=[("test_host_experts:EverySecond", {})]).whole(),
    *EXPERTS._replace(policies=RANDOM_ROWS).in_turn(),
    *Grid(EXPERTS.models[:2], [EMULATED], [*SCHEDULES.policies, *EXPERTS.policies]).in_turn(),
]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model], Reference]:
    """The reference of a model, made once: the tests take the models in turn."""
    return cache(lambda model: Reference.of(model, tmp_path_factory.mktemp("models")))


@pytest.fixture(params=MODELS, ids=name_of)
def reference(request: pytest.FixtureRequest, reference_of: Callable[[Model], Reference]) -> Reference:
    return reference_of(request.param)


@pytest.mark.parametrize(
    ("reference", "case"),
    [pytest.param(each.model, each, id=each.name) for each in RUNS],
    indirect=["reference"],
)
def test_every_policy_gives_the_same_logits(reference: Reference, case: EqualRun) -> None:
    assert not case.differs(reference)


@pytest.mark.parametrize(
    ("reference", "policy"), [*zip(MODELS, cycle(["cgopipe", "flexgen"]))], ids=str, indirect=["reference"]
)
def test_prompts_of_one_length_give_the_same_logits(reference: Reference, policy: str) -> None:
    prompts = [[5, 6, 7], [90, 1, 2], [3, 4, 5], [8, 9]]
    wanted, got = (
        one_batch(
            TorchDevice(reference.checkpoint, reference.layout, keep_logits=True),
            name,
            machine=machine,
            weights=weights,
            prompts=prompts,
            size=4,
        )
        for name, machine, weights in (("resident", ONE_MEMORY, 1.0), (policy, TWO_MEMORIES, 0.8))
    )
    assert same_bits(got.logits_RSV, wanted.logits_RSV)


def test_three_tiers_are_in_use_at_once(reference: Reference) -> None:
    seen = Ended()
    device = TorchDevice(reference.checkpoint, reference.layout, keep_logits=True)
    got = one_batch(device, "three_tiers", machine=THREE_TIERS, weights=0.8, observers=[seen])
    assert same_bits(got.logits_RSV, reference.expected.logits_RSV)
    pins = {task.work.resource for task in seen.tasks if task.verb == "copy_to_pinned"}
    assert pins == {"disk->pinned", "host->pinned"}


@pytest.mark.parametrize(
    ("reference", "policy", "weights"),
    [
        (MODELS[0], "resident", (1.0, 1.0)),
        (MODELS[-1], "cgopipe", (0.8, 0.8)),
        (MODELS[-1], "layer_streaming", (0.8, 1.2, 0.8)),
        (MODELS[0], "cgopipe", (1.2, 0.8, 1.2)),
    ],
    ids=str,
    indirect=["reference"],
)
@pytest.mark.parametrize("machine", [ONE_MEMORY, TWO_MEMORIES], ids=["one memory", "two memories"])
def test_the_next_batch_finds_the_weights_that_stay(
    reference: Reference, machine: Machine, policy: str, weights: tuple[float, ...]
) -> None:
    device = TorchDevice(reference.checkpoint, reference.layout, keep_logits=True)
    read = []
    for share in weights:
        got = one_batch(device, policy, machine=machine, weights=share, keep_open=True)
        assert same_bits(got.logits_RSV, reference.expected.logits_RSV)
        read.append(device.bytes_read)
    asyncio.run(device.aclose())
    if machine is TWO_MEMORIES and len(set(weights)) == 1:
        assert read[1] == read[0] > 0, "all weights are in one of the memories"


@pytest.mark.parametrize("reference", MODELS[:1], ids=name_of, indirect=True)
@pytest.mark.parametrize("machine", [ONE_MEMORY, TWO_MEMORIES], ids=["one memory", "two memories"])
def test_a_batch_frees_the_kv_caches_of_the_one_before(reference: Reference, machine: Machine) -> None:
    device = TorchDevice(reference.checkpoint, reference.layout, keep_logits=True)
    gc.collect()
    gc.disable()
    try:
        before = kv_caches()
        for _ in range(2):
            policy = make_policy("cgopipe")
            generate(device, policy, machine, PROMPTS, new_tokens=2, micro_batch_size=2, keep_open=True)
        assert kv_caches() - before == 1
        device.close()
        assert kv_caches() == before
    finally:
        gc.enable()
