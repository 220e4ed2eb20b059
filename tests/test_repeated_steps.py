"""Decode steps whose shapes repeat: their native calls are prepared once, and made again with new tokens and slots."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from benchmarks.shared.small_runs import ONE_MEMORY, fast_memory
from kernel_tables import kernels_of
from moesched.devices.kernels.binder import Binder
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.workspace import MOST_BOUND, Scratch, Workspace
from moesched.devices.native.attention import LayerAddresses, NativeAttention, SequencesInBlocks
from moesched.devices.native.compiled import availability, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.runner.served import ServedState
from moesched.devices.torch.compute import Compute
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.tasks import Task
from small_models import SMALL
from test_native_layers import PLAIN, random, weights_of

pytestmark = pytest.mark.skipif(not instruction_sets(), reason=availability())

PREPARING = {"data_ptr", "from_buffer_copy"}
"""Functions of C without which no arguments of a native call are made."""

MODEL = SMALL.varied(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2
)


class CountingDevice(TorchDevice):
    """A device that counts, by step, the functions of torch that tasks call, and those that prepare arguments."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.calls: Counter[tuple[str, int]] = Counter()

    def execute(self, task: Task) -> Any:
        def note(frame: FrameType, event: str, function: Any) -> None:
            if event == "c_call" and (function.__name__ in PREPARING or _is_torchs(function)):
                self.calls[task.verb, task.step] += 1

        sys.setprofile(note)
        try:
            return super().execute(task)
        finally:
            sys.setprofile(None)


def _is_torchs(function: Any) -> bool:
    owner = function.__self__
    return "torch" in f"{function.__module__} {type(owner).__module__} {owner!r:.60}"


@pytest.fixture
def kernels() -> Iterator[Binder]:
    with closing(NativeKernels(16, threads=2)) as native:
        yield kernels_of(PLAIN, native)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(MODEL, tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize("requests", [1, 3])
def test_a_decode_step_whose_shapes_repeat_calls_nothing_of_torch_and_makes_no_arguments(
    model: Path, requests: int
) -> None:
    checkpoint = open_checkpoint(model)
    device = CountingDevice(checkpoint, weight_layout(checkpoint.config, "bfloat16"))
    prompts = [list(range(5, 8 + request)) for request in range(requests)]
    batch = split_batch([len(prompt) for prompt in prompts], 18, requests)
    policy, budgets = make_policy("resident"), fast_memory(device, ONE_MEMORY, batch, 2.0)
    run(
        plan_run(ONE_MEMORY, device.layout, batch, policy, budgets, device.slot_bytes),
        policy,
        device,
        prompts,
    )
    steps = {step for _, step in device.calls}
    assert 1 in steps, "the first decode step prepares the calls"
    assert not steps & set(range(2, 18)), device.calls


def captured(kernels: Binder, memory: Workspace) -> torch.Tensor:
    """The hidden states after a layer of a step of as many tokens as the memory has rows."""
    weights, tokens = weights_of(PLAIN), range(memory.rows)
    embedding = Weights({"embedding": [random(PLAIN.vocabulary, PLAIN.hidden, seed=1)]})
    hidden_TD, angles = kernels.bound("embed", embedding, memory)(tokens, tokens, [])
    queries, *_ = kernels.bound("attention_inputs", weights, memory)(hidden_TD, angles)
    layer = kernels.fused("moe_layer", weights, memory)
    assert layer is not None, "a native kernel takes it"
    out_TD: torch.Tensor = layer(queries.flatten(1), hidden_TD)[0]
    return out_TD.clone()


def test_a_batch_that_shrinks_has_the_same_bits_in_memory_that_shares_what_is_intermediate(
    kernels: Binder,
) -> None:
    scratch = Scratch()
    large, small = (captured(kernels, Workspace(rows, scratch)) for rows in (7, 2))
    assert torch.equal(small, large[:2])


def test_a_place_keeps_memory_for_several_numbers_of_rows_and_the_oldest_makes_room() -> None:
    state, scratch = ServedState(), Scratch()
    first, *others = [state.take_memory(rows, scratch) for rows in range(1, state.most_memories + 2)]
    assert [state.take_memory(memory.rows, scratch) for memory in others] == others
    assert state.take_memory(first.rows, scratch) is not first


def test_kernels_bound_to_streamed_weights_do_not_add_up() -> None:
    memory = Workspace(1)
    for number in range(3 * MOST_BOUND):
        memory.keep(number, lambda: 0)
    kept = sum(memory.bound(number) is not None for number in range(3 * MOST_BOUND))
    assert 0 < kept <= MOST_BOUND


def test_hidden_states_from_elsewhere_are_read_there_and_change_no_bound_kernel(kernels: Binder) -> None:
    weights, memory = weights_of(PLAIN), Workspace(3)
    own_TD, other_TD = (random(3, PLAIN.hidden, seed=seed) for seed in (2, 3))
    angles = tuple(torch.full((3, 1, PLAIN.attention.head_dim), 0.5) for _ in range(2))

    def values(hidden_TD: torch.Tensor) -> torch.Tensor:
        queries_keys_values = kernels.bound("attention_inputs", weights, memory)(hidden_TD, angles)
        cloned: torch.Tensor = queries_keys_values[2].clone()
        return cloned

    own, others = values(own_TD), values(other_TD)
    assert not torch.equal(own, others)
    assert torch.equal(values(own_TD), own)
    assert torch.equal(values(other_TD.clone()), others)


def test_a_prepared_call_of_attention_follows_its_sequence_to_new_slots() -> None:
    block, past = 4, 6
    query, key, value = (random(1, heads, 8, seed=heads).float() for heads in (4, 2, 1))
    value = value.expand(1, 2, 8).contiguous()
    cache = [random(40, 2, 8, seed=seed).float() for seed in (7, 8)]
    cached = LayerAddresses(cache[0].data_ptr(), cache[1].data_ptr(), block)
    out = torch.empty(1, 32)
    with closing(NativeKernels(0, threads=1)) as kernels:
        attention = NativeAttention(kernels)
        prepared = attention.prepared(query, key, value, cached, out)
        for new in range(4):  # into a third block
            blocks = [5, 2, 8][: -(-(past + new) // block)]
            sequences = SequencesInBlocks.of(array("q", [past + new]), array("q", blocks))
            prepared(sequences)
            assert torch.equal(out, attention.attend(query, key, value, cached, sequences))


def test_an_accelerator_with_a_memory_of_its_own_has_no_native_tasks(model: Path) -> None:
    layout = weight_layout(open_checkpoint(model).config, "bfloat16")
    compute = Compute("cuda", layout, "auto", pin=False, threads=1)
    with closing(compute):
        compute.start(1.0)
        assert compute.kernels.fused("moe_layer", weights_of(PLAIN), Workspace(1)) is None
