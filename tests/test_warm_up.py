"""Warm-up: a GPU runs its kernels before the first step, in memory that the plan has and nothing needs yet."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread

import pytest

from moesched.devices.lagging.device import LaggingDevice, LaggingGpu
from moesched.devices.shared.verbs import after
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.resident_pages import ResidentPages
from moesched.devices.torch.warm_up import WarmUps, WarmUpSizes
from moesched.models.checkpoint import Checkpoint
from moesched.requests.sampling import Sampling
from moesched.steps.plan import Plan
from moesched.tasks import Lane, PageTransfer, Task
from moesched.work import Work
from odd_models import MIXTRAL, layout_of
from odd_runs import report_of

LATER = {"copy_", "to", "__getitem__", "split", "new_empty"}
"""Functions that start no kernel: copies between the host and the GPU, views, memory."""


class Noting(LaggingDevice):
    """Notes which functions had been called when the first step began."""

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        super().begin(plan, prompts, sampling)
        self.warm: set[str] = set()
        self._verbs["embed"] = after(self._note, self._verbs["embed"])

    def _note(self, task: Task) -> None:
        if not self.warm:
            self.warm = set(self.gpu.operations.calls)
            self.gpu.operations.calls.clear()


@pytest.mark.parametrize("policy", ["layer_streaming", "flexgen", "cgopipe"])
def test_a_step_calls_nothing_on_the_gpu_that_the_warm_up_did_not(
    checkpoint: Checkpoint, policy: str
) -> None:
    device = Noting(checkpoint, layout_of(MIXTRAL, "float32"), gpu=LaggingGpu(seed=1))
    report_of(device, policy, weights=0.8, keep_open=True)
    device.close()
    assert "linear" in device.warm
    assert device.gpu.operations.calls.keys() - device.warm <= LATER


def test_only_new_shapes_are_warmed_up_and_the_report_says_how_long_it_took(checkpoint: Checkpoint) -> None:
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), gpu=LaggingGpu(seed=1))
    first, second = (report_of(device, "resident", keep_open=True) for _ in range(2))
    device.close()
    assert first.warm_up_seconds is not None and first.warm_up_seconds > 0
    assert second.warm_up_seconds is None


def test_the_cpu_has_nothing_to_warm_up(checkpoint: Checkpoint) -> None:
    device = TorchDevice(checkpoint, layout_of(MIXTRAL, "float32"))
    report = report_of(device, "resident", keep_open=True)
    device.close()
    assert report.warm_up_seconds is None


class Loading(ResidentPages):
    """Pages that are to be loaded, without files."""

    def __init__(self, awaited: int) -> None:
        self.awaited = awaited


def load_of(pages: int) -> PageTransfer:
    return PageTransfer(Lane("disk"), Work("load", "disk"), "load", pages=(None,) * pages)


def test_the_last_pages_wait_for_the_warm_up_whose_memory_they_take() -> None:
    go_on, loading = Event(), Loading(awaited=3)
    warm_ups = WarmUps()
    end_before_the_last = warm_ups.start(go_on.wait, loading)
    end_before_the_last(load_of(2))
    loading.awaited = 1
    last = Thread(target=end_before_the_last, args=[load_of(1)])
    last.start()
    assert last.is_alive()
    go_on.set()
    last.join()
    assert warm_ups.seconds() is not None


def test_an_error_of_the_warm_up_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        WarmUps().start(fail, Loading(awaited=0))
    warm_ups = WarmUps()
    end_before_the_last = warm_ups.start(fail, Loading(awaited=1))
    with pytest.raises(MemoryError):
        end_before_the_last(load_of(1))
    assert warm_ups.seconds() is None


def test_shapes_are_new_once() -> None:
    warm_ups, shapes = WarmUps(), WarmUpSizes(1, 2, 3, 4, 5)
    assert [warm_ups.is_new(shapes), warm_ups.is_new(shapes)] == [True, False]
