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
from _small_runs import ONE_MEMORY, TWO_MEMORIES, fast_memory, generate

from moesched.devices.native.arguments import LayerWeights
from moesched.devices.native.attention import CachedLayer, NativeAttention, SequencesInBlocks
from moesched.devices.native.buffers import StepBuffers
from moesched.devices.native.calls import MOST_KEPT, Calls
from moesched.devices.native.compiled import availability, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.native.layers import MOST_SHAPES, NativeLayers
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
from test_native_layers import MOST_ROWS, PLAIN, random, weights_of

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
def layers() -> Iterator[NativeLayers]:
    with closing(NativeKernels(MOST_ROWS, threads=2)) as native:
        yield NativeLayers(PLAIN, native)


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


def captured(layers: NativeLayers, shapes: dict[int, StepBuffers], tokens: int) -> torch.Tensor:
    """The hidden states after a layer of a step of that many tokens, from the buffers kept in `shapes`."""
    weights = weights_of(PLAIN)
    buffers = layers.buffers(tokens, shapes)
    layers.embed(buffers, range(tokens), range(tokens), random(PLAIN.vocabulary, PLAIN.hidden, seed=1))
    layers.attention_inputs(buffers, buffers.hidden_TD, buffers.angles, weights)
    buffers.attended_TX.copy_(buffers.qkv[0].flatten(1))
    layers.run(buffers, buffers.hidden_TD, buffers.attended_TX, weights)
    return buffers.hidden_TD.clone()


def test_a_batch_that_shrinks_gets_calls_of_its_own_and_has_the_old_ones_when_it_grows(
    layers: NativeLayers,
) -> None:
    shapes: dict[int, StepBuffers] = {}
    large = captured(layers, shapes, 7)
    of_seven = shapes[7]
    small = captured(layers, shapes, 2)
    assert torch.equal(small, large[:2])
    assert torch.equal(captured(layers, shapes, 7), large)
    assert shapes[7] is of_seven
    assert shapes[2] is not of_seven


def test_the_shape_that_was_made_first_makes_room_for_another(layers: NativeLayers) -> None:
    shapes: dict[int, StepBuffers] = {}
    for tokens in range(1, MOST_SHAPES + 2):
        layers.buffers(tokens, shapes)
    assert list(shapes) == list(range(2, MOST_SHAPES + 2))


def test_calls_for_streamed_weights_do_not_add_up() -> None:
    calls = Calls()
    for _ in range(3 * MOST_KEPT):
        calls.keep(LayerWeights(), lambda: 0)
    assert 0 < len(calls) <= MOST_KEPT


def test_hidden_states_from_elsewhere_are_read_there_and_change_no_prepared_call(
    layers: NativeLayers,
) -> None:
    weights, shapes = weights_of(PLAIN), dict[int, StepBuffers]()
    buffers = layers.buffers(3, shapes)
    buffers.hidden_TD.copy_(random(3, PLAIN.hidden, seed=2))
    other_TD = random(3, PLAIN.hidden, seed=3)
    for angles in buffers.angles:
        angles.fill_(0.5)

    def values(hidden_TD: torch.Tensor) -> torch.Tensor:
        layers.attention_inputs(buffers, hidden_TD, buffers.angles, weights)
        return buffers.qkv[2].clone()

    own, others = values(buffers.hidden_TD), values(other_TD)
    assert not torch.equal(own, others)
    assert torch.equal(values(buffers.hidden_TD), own)
    assert torch.equal(values(other_TD.clone()), others)


def test_a_prepared_call_of_attention_follows_its_sequence_to_new_slots() -> None:
    block, past = 4, 6
    query, key, value = (random(1, heads, 8, seed=heads).float() for heads in (4, 2, 1))
    value = value.expand(1, 2, 8).contiguous()
    cache = [random(40, 2, 8, seed=seed).float() for seed in (7, 8)]
    cached = CachedLayer(cache[0].data_ptr(), cache[1].data_ptr(), block)
    out = torch.empty(1, 32)
    with closing(NativeKernels(0, threads=1)) as kernels:
        attention = NativeAttention(kernels)
        prepared = attention.prepared(query, key, value, cached, out)
        for new in range(4):  # into a third block
            blocks = [5, 2, 8][: -(-(past + new) // block)]
            sequences = SequencesInBlocks(array("q", [past + new]), array("q", blocks))
            prepared(sequences)
            assert torch.equal(out, attention.attend(query, key, value, cached, sequences))


@pytest.mark.parametrize("policy", ["cgopipe", "layer_streaming", "expert_streaming"])
def test_steps_that_repeat_have_the_same_bits_under_every_policy(model: Path, policy: str) -> None:
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config, "bfloat16")
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]

    def logits(name: str) -> torch.Tensor:
        machine = ONE_MEMORY if name == "resident" else TWO_MEMORIES
        device = TorchDevice(checkpoint, layout, keep_logits=True)
        return generate(
            device, make_policy(name), machine, prompts, new_tokens=18, micro_batch_size=2, weights=1.5
        ).logits_RSV

    assert torch.equal(logits(policy), logits("resident"))


def test_an_accelerator_with_a_memory_of_its_own_has_no_native_tasks(model: Path) -> None:
    layout = weight_layout(open_checkpoint(model).config, "bfloat16")
    compute = Compute("cuda", layout, "auto", pin=False, threads=1)
    with closing(compute):
        compute.start(1.0)
        assert compute.native is None
