"""Imitated CUDA graphs: replays use the addresses of the captured calls, and a capture refuses what CUDA refuses."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from moesched.devices.lagging.device import GPU_DEVICE, LaggingGpu
from moesched.devices.lagging.segments import POISON

MB = 1 << 20


def module() -> Any:
    return torch.get_device_module(GPU_DEVICE)


def captured(run: Callable[[], Any], **arguments: Any) -> tuple[Any, Any]:
    """A graph of a call, and the call's result."""
    graph = module().CUDAGraph()
    graph.capture_begin(**arguments)
    try:
        result = run()
    finally:
        graph.capture_end()
    return graph, result


def test_a_capture_runs_nothing_and_each_replay_runs_it_on_what_is_there_by_then(gpu: LaggingGpu) -> None:
    given = torch.ones(3, device=GPU_DEVICE)
    module().synchronize()
    ran = gpu.streams.ran
    graph, doubled = captured(lambda: given * 2)
    module().synchronize()
    assert gpu.streams.ran == ran
    for number in (3, 5):
        given.fill_(number)
        graph.replay()
        assert doubled.tolist() == [2 * number] * 3
    assert gpu.streams.replays == 2


def test_a_replay_reads_the_memory_of_the_capture_and_not_a_tensor_of_the_same_name(gpu: LaggingGpu) -> None:
    given = {"x": torch.ones(3, device=GPU_DEVICE)}
    first = given["x"]
    graph, doubled = captured(lambda: given["x"] * 2)
    given["x"] = torch.full((3,), 7.0, device=GPU_DEVICE)
    graph.replay()
    assert doubled.tolist() == [2.0] * 3 == (2 * first).tolist()


def test_a_replay_whose_memory_was_freed_fails(gpu: LaggingGpu) -> None:
    given = [torch.ones(3, device=GPU_DEVICE)]
    graph, _ = captured(lambda: given[0] * 2)
    given.clear()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


def test_results_have_memory_that_calls_outside_of_the_graph_do_not_get(gpu: LaggingGpu) -> None:
    given = torch.ones(3, device=GPU_DEVICE)
    graph, between = captured(lambda: (given + 1) * 2)
    place = between.data_ptr()
    del between
    others = [torch.zeros(3, device=GPU_DEVICE) for _ in range(5)]
    assert place not in [each.data_ptr() for each in others]
    graph.replay()
    assert [each.tolist() for each in others] == [[0.0] * 3] * 5


def test_graphs_that_share_a_pool_take_turns_in_its_memory(gpu: LaggingGpu) -> None:
    given = torch.ones(3, device=GPU_DEVICE)
    pool = module().graph_pool_handle()
    first, result = captured(lambda: given + 1, pool=pool)
    place = result.data_ptr()
    del result
    second, other = captured(lambda: given + 2, pool=pool)
    assert other.data_ptr() == place
    second.replay()
    first.replay()
    assert other.tolist() == [2.0] * 3, "the first graph wrote to its old memory"


def test_a_pool_whose_graphs_are_all_gone_takes_no_others(gpu: LaggingGpu) -> None:
    given = torch.ones(3, device=GPU_DEVICE)
    pool = module().graph_pool_handle()
    captured(lambda: given + 1, pool=pool)
    gc.collect()
    with pytest.raises(RuntimeError, match="use_count"):
        captured(lambda: given + 1, pool=pool)


def test_memory_that_a_captured_call_leaves_unwritten_is_poisoned_by_each_replay(gpu: LaggingGpu) -> None:
    graph, left = captured(lambda: torch.empty(4, dtype=torch.uint8, device=GPU_DEVICE))
    for _ in range(2):
        graph.replay()
        assert left.tolist() == [POISON] * 4
        left.zero_()


def test_an_argument_that_the_host_overwrites_before_a_replay_ran_is_seen() -> None:
    seen = set()
    for seed in range(8):
        with LaggingGpu(seed=seed) as gpu, gpu.streams.on(gpu.streams.new_stream()):
            held = torch.zeros(1, pin_memory=True)
            there = torch.zeros(1, device=GPU_DEVICE)
            graph, result = captured(partial(torch.mul, there, 10))
            held.fill_(1)
            there.copy_(held, non_blocking=True)
            graph.replay()
            held.fill_(2)
            seen.add(result.item())
    assert seen == {10.0, 20.0}


def wait_for_an_event() -> None:
    event = module().Event()
    event.record()
    event.synchronize()


def elsewhere(run: Callable[[], object]) -> Callable[[torch.Tensor], None]:
    """A call on another stream."""

    def call(_: torch.Tensor) -> None:
        with module().stream(module().Stream()):
            run()

    return call


def edge_from(_: torch.Tensor) -> None:
    event = module().Event()
    event.record()
    module().Stream().wait_event(event)


def edge_to(_: torch.Tensor) -> None:
    event = module().Event()
    event.record(module().Stream())
    module().current_stream().wait_event(event)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "a value": lambda given: given.sum().item(),
    "a shape by values": lambda given: given.nonzero(),
    "a copy to ordinary memory": lambda given: given.cpu(),
    "a copy from ordinary memory": lambda given: given.copy_(torch.zeros(3), non_blocking=True),
    "a wait for an event": lambda _: wait_for_an_event(),
    "a look at an event": lambda _: module().Event().query(),
    "a wait for the stream": lambda _: module().current_stream().synchronize(),
    "a wait for the GPU": lambda _: module().synchronize(),
    "a wait on another stream": elsewhere(lambda: module().current_stream().synchronize()),
    "memory on another stream": elsewhere(lambda: torch.empty(30 * MB, device=GPU_DEVICE)),
    "an edge to another stream": edge_from,
    "an edge from another stream": edge_to,
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_breaks_the_capture_and_the_stream_goes_on(what: str) -> None:
    with LaggingGpu(seed=1) as gpu, gpu.streams.on(gpu.streams.new_stream()):
        given = torch.ones(3, device=GPU_DEVICE)
        graph = module().CUDAGraph()
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            REFUSED[what](given)
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
        assert (given * 2).tolist() == [2.0] * 3


@pytest.mark.parametrize(("mode", "refuses"), [("global", True), ("thread_local", False)])
def test_other_threads_may_take_memory_in_the_mode_for_that(mode: str, refuses: bool) -> None:
    with LaggingGpu(seed=1) as gpu, gpu.streams.on(gpu.streams.new_stream()):
        errors: list[Exception] = []

        def allocate() -> None:
            with gpu:
                try:
                    torch.empty(30 * MB, device=GPU_DEVICE)
                except RuntimeError as error:
                    errors.append(error)

        graph = module().CUDAGraph()
        graph.capture_begin(capture_error_mode=mode)
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        assert bool(errors) is refuses
        if not refuses:
            graph.capture_end()


def test_a_full_gpu_has_no_memory_for_a_graph_and_keeps_what_it_holds() -> None:
    with LaggingGpu(capacity=40 * MB) as gpu, gpu.streams.on(gpu.streams.new_stream()):
        unused = torch.empty(30 * MB, dtype=torch.uint8, device=GPU_DEVICE)
        del unused
        with pytest.raises(torch.OutOfMemoryError):
            captured(lambda: torch.empty(20 * MB, dtype=torch.uint8, device=GPU_DEVICE))
        assert torch.empty(32 * MB, dtype=torch.uint8, device=GPU_DEVICE).nbytes == 32 * MB


def test_the_default_stream_is_not_captured() -> None:
    with LaggingGpu(), pytest.raises(RuntimeError, match="non-default stream"):
        module().CUDAGraph().capture_begin()
