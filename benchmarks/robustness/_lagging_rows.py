"""Questions of the lagging device's benchmark to a policy, one function each.

As a program it runs every case with one seed, up to the first that is wrong.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks.robustness._lagging_runs import (
    CASES,
    LOCKED,
    WAYS,
    Case,
    Models,
    Size,
    expected,
    on_gpu,
    over_budget,
)
from benchmarks.robustness._lagging_spans import minutes_of_tasks
from moesched.devices.lagging.device import LaggingGpu
from moesched.devices.lagging.streams import DeviceLost
from moesched.devices.runner.micro_batch import MicroBatchState
from moesched.devices.torch.gpu_memory import WORKSPACE_BYTES
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.errors import TaskFailed
from moesched.tasks import Task
from moesched.trace import About, Recorder, check_trace, write_trace
from odd_models import DBRX, GLM, GPT_OSS, GRANITE, MINIMAX, OLMOE, stored
from policies_for_two_memories import STREAM_MOST

FAMILIES = (OLMOE, DBRX, MINIMAX, GLM, GPT_OSS, GRANITE)
NAMED = {case.name: case for case in CASES}

DEEP = Size([[number % 90 + 1, 7] for number in range(32)], 17, 1)
"""32 micro-batches, and 16 steps after prefill."""
DEEP_LAYERS = 32
SAMPLED = 2_000
"""Tasks between two looks at what is remembered."""
SECONDS = 5.0
"""Time in which a run has to end after an error."""
LIBRARIES = 256_000_000
"""Bytes that cuBLAS and others take of a GPU."""
STORY = r"failed on lane .* after waiting for "
"""Words of an error's message: the place where a task failed, and the tasks that it waited for."""
LOST = "gave up: CUDA error"
"""Words of the message of a rank whose partner failed."""
TRACED = 20
"""Every such seed's trace is checked."""


class Answer(NamedTuple):
    """The problems of some runs, and the most of some figures."""

    problems: list[str]
    most: Mapping[str, float] = {}


def bits(case: Case, first: int, count: int) -> Answer:
    """Check that batches of several seeds have the CPU's bits, keep to the plan's bytes, and have valid traces."""
    problems: list[str] = []
    with models_of() as models:
        wanted = expected(models, case)
        for seed in range(first, first + count):
            gpu = LaggingGpu(seed=seed, count=WAYS[case.way].ranks)
            team = on_gpu(models, WAYS[case.way], gpu)
            recorder = Recorder() if seed % TRACED == 0 else None
            ended = team.run(case.policy, case.settings, recorder=recorder)
            team.close()
            problems += gpu.pinned.faults
            problems += over_budget(ended, gpu, WAYS[case.way].nodes)
            if not ended.has_bits_of(wanted):
                problems.append(f"seed {seed}: other bits")
            if case.policy in STREAM_MOST and not ended.streamed_pages:
                problems.append("all weights are kept")
            if recorder is not None:
                problems += trace_problems(recorder, ended.plans[0].machine.name)
    return Answer(problems)


def _wrong(models: Models, case: Case, seed: int, count: int) -> str:
    way = WAYS[case.way]
    gpu = LaggingGpu(seed=seed, count=way.ranks)
    team = on_gpu(models, way, gpu)
    wanted = expected(models, case)
    for _ in range(count):
        try:
            ended = team.run(case.policy, case.settings)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not ended.has_bits_of(wanted):
            return "other bits"
        if over := [*over_budget(ended, gpu, way.nodes)]:
            return over[0]
    team.close()
    gc.collect()
    if gpu.pinned.faults or gpu.pinned.registered:
        return next(iter(gpu.pinned.faults), "memory stays registered")
    if case.policy in LOCKED and gpu.operations.blocked:
        return f"{gpu.operations.blocked} copies block their thread"
    return ""


def trace_problems(recorder: Recorder, machine: str) -> list[str]:
    """Problems in the trace of a run."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        write_trace(file, recorder.recording(), About(driver="realtime", machine=machine))
        return check_trace(file)


class Remembered:
    """Looks now and then at what the GPU and the device remember: events, blocks of memory, work in queues."""

    def __init__(self, gpu: LaggingGpu) -> None:
        self.tasks = 0
        self.seen: list[tuple[int, int, int]] = []
        self._gpu = gpu

    def ended(self, task: Task) -> None:
        """Count a task."""
        self.tasks += 1
        if self.tasks % SAMPLED == 0:
            gpu = self._gpu
            self.seen.append((len(gpu.streams.events), gpu.memory.in_use(), gpu.streams.queued))

    def most(self, part: slice) -> list[int]:
        """The most of each in a part of the looks."""
        return [max(column) for column in zip(*self.seen[part], strict=True)]


def deep(case: Case, first: int, count: int) -> Answer:
    """Run many layers and micro-batches, and compare the memory that is held early and late in the run."""
    with models_of(layers=DEEP_LAYERS) as models:
        gpu = LaggingGpu(seed=first)
        team = on_gpu(models, WAYS[case.way], gpu)
        watch = Remembered(gpu)
        ended = team.run(case.policy, case.settings, DEEP, observers=[watch])
        team.close()
        problems = list(over_budget(ended, gpu))
    quarter = len(watch.seen) // 4
    early, late = watch.most(slice(quarter, 2 * quarter)), watch.most(slice(-quarter, None))
    if any(after > 1.1 * before + 50 for before, after in zip(early, late, strict=True)):
        problems.append(f"events, bytes and queued work grow from {early} to {late}")
    return Answer(problems, {"tasks": watch.tasks})


def batches(case: Case, first: int, count: int) -> Answer:
    """The bytes in use after each batch of several, and whether states of an earlier one are alive.

    The first batch is not compared: torch keeps frames of first calls.
    """
    with models_of() as models:
        gpu = LaggingGpu(seed=first, count=WAYS[case.way].ranks)
        team = on_gpu(models, WAYS[case.way], gpu)
        gc.collect()
        gc.disable()
        held = []
        try:
            for _ in range(count + 1):
                team.run(case.policy, case.settings)
                in_use = [memory.in_use() for memory in gpu.memories]
                held.append((in_use, living(BlockedKV), living(MicroBatchState)))
        finally:
            gc.enable()
        team.close()
    flat = held[1:] == held[1:2] * count
    return Answer([] if flat else [f"bytes, caches and states grow: {held[1:]}"])


def living(kind: type) -> int:
    """Objects of a class that are alive."""
    return sum(type(each) is kind for each in gc.get_objects())


def errors(case: Case, first: int, count: int) -> Answer:
    """Run a case with errors at random pieces of work on random streams, and collect the problems."""
    way = WAYS[case.way]
    problems, slowest = [], 0.0
    with models_of() as models:
        for number in range(first, first + count):
            choose = Random(number)
            seed = choose.randrange(10**6)
            gpu = LaggingGpu(seed=seed, count=way.ranks)
            team = on_gpu(models, way, gpu)
            began = _work_before_the_first_task(team, gpu)
            team.run(case.policy, case.settings)
            team.close()
            place = choose.randint(began[0] + 1, gpu.streams.ran)
            gpu = LaggingGpu(seed=seed, count=way.ranks, fails_at=place)
            threads = threading.active_count()
            said = _failing(models, case, gpu)
            if gpu.streams.failed_at is not None:
                slowest = max(slowest, (time.perf_counter_ns() - gpu.streams.failed_at) / 1e9)
            left = _left_over(gpu, threads)
            if said or left:
                problems.append(f"{number}: {said} {left}")
    if slowest >= SECONDS:
        problems.append(f"a run ends {slowest:.1f} s after its error")
    return Answer(problems, {"seconds": round(slowest, 3)})


def _work_before_the_first_task(team: Any, gpu: LaggingGpu) -> list[int]:
    """The pieces of work that have run when the first task begins; known when a batch has run."""
    began: list[int] = []
    device = team.devices[0]
    begin = device.begin

    def noting(*arguments: Any) -> None:
        begin(*arguments)
        gpu.streams.synchronize(0)
        began[:] = [gpu.streams.ran]

    device.begin = noting
    return began


def _failing(models: Models, case: Case, gpu: LaggingGpu) -> str:
    """Run a batch that fails; returns what is wrong with its error."""
    team = on_gpu(models, WAYS[case.way], gpu)
    try:
        team.run(case.policy, case.settings)
    except TaskFailed as error:
        causes = list(_causes(error))
        if not any(isinstance(each, DeviceLost) for each in causes) and LOST not in str(error):
            return f"its cause is {causes}"
        return "" if re.search(STORY, str(error)) else f"no story: {error}"
    except BaseException as error:
        return f"{type(error).__name__} instead of TaskFailed: {error}"
    finally:
        team.close()
    return "no error"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _left_over(gpu: LaggingGpu, threads: int) -> str:
    """Count the threads, bytes and objects that a failed run left behind."""
    for _ in range(3):  # torch keeps tensors of a cycle over one collection
        gc.collect()
    left = {
        "threads": threading.active_count() - threads,
        "bytes": sum(memory.in_use() for memory in gpu.memories),
        "caches": living(BlockedKV),
        "states": living(MicroBatchState),
        "registrations": len(gpu.pinned.registered),
        "faults of locked memory": len(gpu.pinned.faults),
    }
    return ", ".join(f"{count} {what}" for what, count in left.items() if count)


def ledger(case: Case, first: int, count: int) -> Answer:
    """Tell whether batches run on a GPU whose free memory gives just their plan, and the bytes beyond the plan.

    The allocator rounds up as torch's does, and the libraries have taken their part.
    """
    worst = {"blocks": 0.0, "segments": 0.0}
    with models_of(hidden=256, intermediate=512, layers=4, experts=8) as models:
        for seed in range(first, first + count):
            way = WAYS[case.way]
            planned = [
                plan.memory("accelerator").used
                for plan in on_gpu(models, way, LaggingGpu(count=way.ranks)).planned(
                    case.policy, case.settings
                )
            ]
            free = round((max(planned) + WORKSPACE_BYTES) / 0.95)
            gpu = LaggingGpu(seed=seed, count=way.ranks, capacity=free - LIBRARIES)
            team = on_gpu(models, way, gpu)
            ended = team.run(case.policy, case.settings)
            team.close()
            if over := list(over_budget(ended, gpu)):
                return Answer(over)
            for memory, nbytes in zip(gpu.memories, planned, strict=True):
                worst["blocks"] = max(worst["blocks"], memory.most_taken - nbytes)
                worst["segments"] = max(worst["segments"], memory.most_reserved - nbytes)
    return Answer([], {f"{name} beyond the plan": nbytes for name, nbytes in worst.items()})


def spans(case: Case, first: int, count: int) -> Answer:
    """Check that times of ten minutes fit each other, on clocks that drift."""
    found = [minutes_of_tasks(seed) for seed in range(first, first + count)]
    problems = [problem for each in found for problem in each.problems][:10]
    worst = max(each.worst for each in found)
    return Answer(problems, {"tasks": max(each.tasks for each in found), "nanoseconds too early": worst})


def families(case: Case, first: int, count: int) -> Answer:
    """Run two batches of other families, and check their bits, the plan's bytes, and copies that block their thread."""
    problems = []
    for seed, config in enumerate(FAMILIES[first : first + count]):
        with TemporaryDirectory() as folder:
            checkpoint = stored(config, Path(folder))
            if wrong := _wrong(Models(checkpoint, checkpoint), case, seed, count=2):
                problems.append(f"{config.name}: {wrong}")
    return Answer(problems)


@contextmanager
def models_of(**changes: int) -> Iterator[Models]:
    """Models in a folder that goes with the context."""
    with TemporaryDirectory() as folder:
        yield Models.stored(Path(folder), **changes)


QUESTIONS: dict[str, Callable[[Case, int, int], Answer]] = {
    each.__name__: each for each in (bits, families, deep, batches, errors, ledger, spans)
}


def answer(question: str, case: str, first: int, count: int) -> Answer:
    """Answer a question in a process of its own."""
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # else the bits of float32 depend on where operands lie
    torch.set_num_threads(1)
    gc.freeze()  # each batch begins with a collection of garbage
    return QUESTIONS[question](NAMED[case], first, count)


def main() -> None:
    """Two batches of each case by seed 0, up to the first that is wrong: its name ends the process.

    They are checked for bits, the plan's bytes, and copies that block their thread.
    """
    torch.set_num_threads(1)
    with models_of() as models:
        for case in CASES:
            if wrong := _wrong(models, case, seed=0, count=2):
                print(f"{case.name}: {wrong}")
                sys.exit(1)


if __name__ == "__main__":
    main()
