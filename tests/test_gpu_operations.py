"""Operations that a calibration of a GPU times, by the device's own code, on an imitated GPU: times mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from moesched.calibration.exercise import FinishedTasks
from moesched.calibration.extent import small_model
from moesched.calibration.gpu_exercise import GpuExercise
from moesched.calibration.gpu_extent import QUICK_GPU, THOROUGH_GPU, GpuExtent
from moesched.calibration.gpu_probe import GPU, Copy, Operation, Product, Stream
from moesched.calibration.gpu_tasks import GpuTasks
from moesched.calibration.model_runs import run_exercise
from moesched.calibration.task_times import RunKey
from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.torch.gpu_operations import GpuOperations, is_enqueued
from moesched.machines import Machine, load_machine
from moesched.machines.gpu_cost import GpuCosts
from moesched.machines.staging import staged
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.requests.batch import Batch
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.steps.plan import Plan
from moesched.system.cores import divided_cores

TINY = GpuExtent(
    rounds=1,
    matrices=((32, 256),),
    rows=(1, 8),
    host_rows=(1, 8),
    small=1 << 12,
    large=1 << 14,
    stream=1 << 16,
    kernels=3,
    model=small_model("tiny", hidden=64, intermediate=64, heads=4, head_dim=16, vocabulary=128),
    groups=((4,), (4,) * 3),
    steps=3,
)
KINDS = {
    "gpu": {"embed", "pre_attention", "attention", "post_attention", "route", "combine", "sample"},
    "cpu": {"cpu_attention", "expert at host"},
    "gpu->host": {"offload_qkv", "offload_kv", "offload_routed"},
    "host->gpu": {"load_hidden", "load_kv", "load_routed"},
}


@pytest.fixture
def operations() -> Iterator[GpuOperations]:
    with LaggingGpu():
        found = GpuOperations(GPU_DEVICE, divided_cores(1), seconds=1e-4, cold=1 << 15)
        yield found
        found.close()


def test_every_operation_and_every_pair_takes_some_time(operations: GpuOperations) -> None:
    alone = {each: operations.seconds(each) for each in TINY.operations()}
    together = {pair: operations.seconds(*pair) for pair in TINY.pairs()}
    assert min([*alone.values(), *together.values()]) > 0
    assert {each.processor for each in alone if isinstance(each, Product)} == {"gpu", "cpu"}


def test_small_matrices_are_so_many_that_they_exceed_a_cache() -> None:
    cache = 1 << 18
    with LaggingGpu() as gpu, closing(GpuOperations(GPU_DEVICE, divided_cores(1), cold=cache)) as operations:
        operations.seconds(Product(GPU, "bfloat16", 32, 32, 1))
        assert gpu.memory.most_wanted >= cache


@pytest.mark.parametrize(
    ("operation", "enqueued"),
    [
        (Copy("host", GPU, 1), True),
        (Copy(GPU, "host", 1), True),
        (Copy("host", "pinned", 1), False),
        (Stream(GPU, 1), True),
        (Stream("host", 1), False),
        (Product("cpu", "float32", 1, 1, 1), False),
    ],
)
def test_the_gpu_does_its_kernels_and_page_locked_copies_by_itself(
    operation: Operation, enqueued: bool
) -> None:
    assert is_enqueued(operation) is enqueued


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(TINY.model, folder)
    return folder


def test_the_small_model_has_tasks_of_every_kind(checkpoint: Path) -> None:
    machine = replace(load_machine("h100"), cost_table=[])
    found, key = GpuTasks(), RunKey(TINY.model, "bfloat16", 0)
    for add, here in ((found.add, machine), (found.add_beside, staged(machine, 4 << 20))):
        policy = GpuExercise(TINY.on_host, beside=here is not machine)
        tasks = run_exercise(
            checkpoint, "bfloat16", policy, TINY.micro_batches, TINY.steps, LaggingDevice, here
        )
        add(key, tasks)
    points = found.points(GpuCosts(machine, "bfloat16").running)
    for resource, kinds in KINDS.items():
        measured = {point.operation for point in points if point.resource == resource}
        assert {f"dispatch {kind}" for kind in kinds} <= measured
    assert {point.rows for point in points if point.operation == "dispatch post_attention"} == {2.0, 4.625}
    assert all(point.seconds > 0 for point in points)


def exercise_plan(extent: GpuExtent, machine: Machine, policy: GpuExercise) -> Plan:
    lengths = [length for group in extent.micro_batches for length in group]
    numbers = iter(range(len(lengths)))
    groups = tuple(tuple(next(numbers) for _ in group) for group in extent.micro_batches)
    batch = Batch(tuple(lengths), extent.steps, groups)
    return plan_run(machine, weight_layout(extent.model), batch, policy)


@pytest.mark.parametrize("extent", [QUICK_GPU, THOROUGH_GPU])
def test_the_small_model_fits_where_page_locked_memory_is_limited(extent: GpuExtent) -> None:
    machine, policy = staged(load_machine("h100"), extent.staging), GpuExercise(extent.on_host, beside=True)
    exercise_plan(extent, machine, policy)
    assert policy.staging is not None


def test_a_fetch_runs_beside_attention_on_the_host_or_beside_cache_writes() -> None:
    policy, finished = GpuExercise(TINY.on_host, beside=True), FinishedTasks()
    plan = exercise_plan(TINY, load_machine("h100"), policy)
    VirtualRun([Rank(plan, policy)], observers=[finished]).run()
    tasks = finished.tasks

    def first_start(step: int, verb: str) -> int:
        return min(task.start for task in tasks if (task.step, task.verb) == (step, verb))

    def last_end(step: int, verb: str) -> int:
        resident = [task for task in tasks if (task.step, task.verb, task.layer) == (step, verb, 0)]
        return max(task.end for task in resident)

    assert last_end(1, "attention") <= min(first_start(1, "fetch"), first_start(1, "offload_kv"))
    assert first_start(2, "fetch") <= last_end(2, "cpu_attention")
    fetches = [task for task in tasks if (task.step, task.verb) == (1, "fetch")]
    assert len(fetches) == 1 + TINY.model.routed.experts
