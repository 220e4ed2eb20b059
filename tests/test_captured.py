"""Captured kernels: calls that repeat are replayed, and no replay has other bits than the call itself."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.shared.small_runs import same_bits
from moesched.devices.kernels.seam import Bound
from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.torch.captured import WARM_CALLS, Captured, Graphs
from moesched.devices.torch.copies import NumberRing
from moesched.models.layout import weight_layout
from odd_models import PROMPTS, WIDE, stored
from odd_runs import one_batch

MB = 1 << 20


class Scale:
    """A kernel with several launches: its input times a factor, and one more, in memory of its own."""

    def __init__(self) -> None:
        self.out = torch.empty(3, device=GPU_DEVICE)

    def __call__(self, x: torch.Tensor, factor: int = 10) -> torch.Tensor:
        return self.out.copy_(x).mul_(factor).add_(1)


def test_the_third_call_is_captured_and_later_ones_are_replayed_on_new_values(gpu: LaggingGpu) -> None:
    graphs = Graphs(GPU_DEVICE)
    scale = Captured(Scale(), graphs)
    x = torch.empty(3, device=GPU_DEVICE)
    for number in range(6):
        x.fill_(number)
        assert scale(x).tolist() == [10 * number + 1] * 3
    assert gpu.operations.calls["mul_"] == gpu.operations.calls["add_"] == WARM_CALLS
    assert gpu.streams.replays == 4
    assert graphs.used == {"replay": ["CUDA graphs"]}


def test_a_call_with_other_addresses_or_numbers_is_no_replay(gpu: LaggingGpu) -> None:
    scale = Captured(Scale(), Graphs(GPU_DEVICE))
    ones, twos = (torch.full((3,), number, device=GPU_DEVICE) for number in (1.0, 2.0))
    for x, factor, result in ((ones, 10, 11), (twos, 10, 21), (twos, 20, 41)):
        for _ in range(WARM_CALLS + 2):
            assert scale(x, factor).tolist() == [result] * 3


def test_each_graph_that_was_in_vain_takes_twice_as_many_equal_calls_to_the_next(gpu: LaggingGpu) -> None:
    graphs = Graphs(GPU_DEVICE)
    scale = Captured(Scale(), graphs)
    x = torch.ones(3, device=GPU_DEVICE)
    for factor in range(200):
        for _ in range(5):
            assert scale(x, factor).tolist() == [factor + 1] * 3
    assert graphs.count == 2


def test_memory_of_a_captured_call_lasts_as_long_as_its_graph(gpu: LaggingGpu) -> None:
    """A replay must not read or write memory that others got."""
    total = torch.zeros(3, device=GPU_DEVICE)

    def add(x: torch.Tensor) -> None:
        total.add_(x)

    captured = Captured(add, Graphs(GPU_DEVICE))
    x = torch.ones(3, device=GPU_DEVICE)
    for _ in range(WARM_CALLS + 1):
        captured(x)
    place = x.data_ptr()
    del x
    gc.collect()
    other = torch.zeros(3, device=GPU_DEVICE)
    assert other.data_ptr() != place


def test_results_that_a_captured_call_allocates_are_the_same_in_all_replays(gpu: LaggingGpu) -> None:
    graphs = Graphs(GPU_DEVICE)
    double, triple = (Captured(lambda x, by=by: (x + 0) * by, graphs) for by in (2, 3))
    x = torch.empty(3, device=GPU_DEVICE)
    for number in range(6):
        x.fill_(number)
        doubled, tripled = double(x), triple(x)
        assert (doubled.tolist(), tripled.tolist()) == ([2 * number] * 3, [3 * number] * 3)


def test_each_replay_has_the_numbers_that_were_uploaded_ahead_of_it(gpu: LaggingGpu) -> None:
    """Through a ring that is used again and again, while the stream lags."""
    ring = NumberRing(GPU_DEVICE, numbers=8)
    block = torch.zeros(3, dtype=torch.int64, device=GPU_DEVICE)
    total = torch.zeros(3, dtype=torch.int64, device=GPU_DEVICE)
    add = Captured(lambda: total.mul_(3).add_(block).remainder_(1009), Graphs(GPU_DEVICE))
    expected = 0
    for number in range(40):
        ring.upload([number] * 3, block)
        add()
        expected = (3 * expected + number) % 1009
    assert total.tolist() == [expected] * 3


def test_a_capture_that_is_refused_leaves_the_call_as_it_is_for_good_and_says_why(gpu: LaggingGpu) -> None:
    graphs = Graphs(GPU_DEVICE)
    asks = Captured(lambda x: x * (1 + x.sum().item()), graphs)
    scale = Captured(Scale(), graphs)
    x = torch.ones(3, device=GPU_DEVICE)
    for _ in range(WARM_CALLS + 3):
        assert asks(x).tolist() == [4.0] * 3
        assert scale(x).tolist() == [11.0] * 3
    assert (graphs.count, gpu.streams.replays) == (0, 0)
    ((why,),) = graphs.used.values()
    assert "previous error during capture" in why


def test_a_full_gpu_captures_no_more_and_graphs_that_exist_go_on() -> None:
    with LaggingGpu(capacity=24 * MB) as gpu, gpu.streams.on(gpu.streams.new_stream()):
        graphs = Graphs(GPU_DEVICE)
        scale = Captured(Scale(), graphs)
        large = Captured(lambda x: torch.zeros(5 * MB, device=GPU_DEVICE)[:3] + x, graphs)
        x = torch.ones(3, device=GPU_DEVICE)
        for _ in range(WARM_CALLS + 2):
            assert scale(x).tolist() == [11.0] * 3
            assert large(x).tolist() == [1.0] * 3
        assert gpu.streams.replays == 2
        assert "out of memory" in graphs.refusal


def test_threads_of_other_lanes_may_use_the_stream_and_its_memory_while_a_kernel_is_captured(
    gpu: LaggingGpu,
) -> None:
    stream = gpu.streams.current

    def work() -> None:
        with gpu, gpu.streams.on(stream):
            torch.empty(30 * MB, device=GPU_DEVICE)
            stream.synchronize()

    def beside_another_lane(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return x.add_(1)

    graphs = Graphs(GPU_DEVICE)
    add = Captured(beside_another_lane, graphs)
    x = torch.zeros(3, device=GPU_DEVICE)
    for number in range(WARM_CALLS + 2):
        assert add(x).tolist() == [number + 1] * 3
    assert graphs.count == 1


def test_graphs_share_the_memory_of_what_their_kernels_drop(gpu: LaggingGpu) -> None:
    graphs = Graphs(GPU_DEVICE)
    x = torch.zeros(3, device=GPU_DEVICE)
    held, reserved = [], []
    for _ in range(3):
        kernel = Captured(lambda x: x.add_(torch.ones(3 * MB, device=GPU_DEVICE)[:3]), graphs)
        for _ in range(WARM_CALLS + 1):
            kernel(x)
        held.append(kernel)
        reserved.append(gpu.memory.reserved)
    assert graphs.count == 3
    assert reserved[0] == reserved[-1]


def test_no_more_graphs_than_the_most_exist_at_a_time(gpu: LaggingGpu) -> None:
    graphs = Graphs(GPU_DEVICE, most=2)
    x, y = torch.ones(3, device=GPU_DEVICE), torch.ones(3, device=GPU_DEVICE)

    def call(kernel: Bound, argument: torch.Tensor = x) -> int:
        """The number of replays in some calls."""
        before = gpu.streams.replays
        for _ in range(WARM_CALLS + 2):
            assert kernel(argument).tolist() == [11.0] * 3
        return gpu.streams.replays - before

    first, second, third = (Captured(Scale(), graphs) for _ in range(3))
    assert [call(each) for each in (first, second, third)] == [2, 2, 0]
    first(y)
    assert call(third), "the first has no graph for its new argument"
    assert graphs.count == 3


def test_kernels_are_captured_after_all_graphs_of_earlier_ones_are_gone(gpu: LaggingGpu) -> None:
    graphs = Graphs(GPU_DEVICE)
    x = torch.ones(3, device=GPU_DEVICE)
    for _ in range(3):
        scale = Captured(Scale(), graphs)
        for _ in range(WARM_CALLS + 1):
            assert scale(x).tolist() == [11.0] * 3
        del scale
        gc.collect()
    assert graphs.count == 3


def test_an_error_of_the_kernel_itself_is_raised(gpu: LaggingGpu) -> None:
    calls = []

    def fails_later(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) > WARM_CALLS:
            raise ValueError("out of luck")
        return x

    kernel = Captured(fails_later, Graphs(GPU_DEVICE))
    x = torch.ones(3, device=GPU_DEVICE)
    for _ in range(WARM_CALLS):
        kernel(x)
    with pytest.raises(ValueError, match="out of luck"):
        kernel(x)


FOUR_LAYERS = WIDE.varied(name="four layers", layers=4)


def test_streamed_weights_have_the_graphs_of_earlier_ones_in_the_same_slots(tmp_path: Path) -> None:
    checkpoint = stored(FOUR_LAYERS, tmp_path)

    def logits(policy: str, weights: float) -> tuple[torch.Tensor, LaggingDevice]:
        layout, gpu = weight_layout(FOUR_LAYERS, "float32"), LaggingGpu(seed=1)
        device = LaggingDevice(checkpoint, layout, keep_logits=True, gpu=gpu, triton=True)
        ran = one_batch(device, policy, weights=weights, new_tokens=6, size=len(PROMPTS))
        return ran.logits_RSV, device

    streamed, device = logits("layer_streaming", 0.6)
    assert same_bits(streamed, logits("resident", 2.0)[0])
    assert device.gpu.streams.replays > 3 * 3 * FOUR_LAYERS.layers
