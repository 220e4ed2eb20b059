"""Budgets: of memories and of the whole process, at most what the machine has; and refused memory."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import moesched
from commands import Said, refused
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput, OutOfMemory, TaskFailed, memory_refusal, report_of
from moesched.inputs.budgets import ASSUMED_RUNTIME, assumed_process, read_budgets, within_process
from moesched.machines import Machine, load_machine
from moesched.machines.staging import staged
from moesched.plugins import make_policy
from moesched.requests.sampling import Sampling
from moesched.runs.out_of_memory import plan_bytes
from moesched.steps.plan import Plan
from moesched.steps.process import ALLOCATOR_BYTES, Process
from moesched.system.memory import (
    available_memory,
    control_groups,
    peak_resident_bytes,
    resident_bytes,
    total_memory,
)
from moesched.tasks import Task
from runs import make_plan
from small_models import small_model

MB = 1_000_000
UNIFIED = load_machine("cpu-nvme")
T4 = load_machine("t4")
MODEL = Path(__file__).parents[1] / "examples" / "tiny-mixtral"


# -- the memory of this machine --------------------------------------------------------------------------------


def system(root: Path, files: Mapping[str, str]) -> Path:
    """A system of 64 GB with 48 GB free, as a folder, with these files."""
    memory = "MemTotal:       64000000 kB\nMemFree: 1 kB\nMemAvailable:   48000000 kB\n"
    for name, text in {"proc/meminfo": memory, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


NESTED = "sys/fs/cgroup/system.slice/job"
FIRST = "sys/fs/cgroup/memory/job"
GROUPS: dict[str, tuple[dict[str, str], int, int]] = {
    "without control groups the memory is the machine's": ({}, 64_000_000 * 1024, 48_000_000 * 1024),
    "of nested ones the smallest limit counts, and cached pages that can be freed count as free": (
        {
            "proc/self/cgroup": "0::/system.slice/job/step\n",
            f"{NESTED}/step/memory.max": "max\n",
            f"{NESTED}/step/memory.current": "1000\n",
            f"{NESTED}/memory.max": "4000000000\n",
            f"{NESTED}/memory.current": "3000000000\n",
            f"{NESTED}/memory.stat": "anon 1000000000\ninactive_file 1500000000\n",
            "sys/fs/cgroup/system.slice/memory.max": "8000000000\n",
        },
        4_000_000_000,
        2_500_000_000,
    ),
    "those of version 1 count beside those of version 2": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
            f"{FIRST}/memory.limit_in_bytes": "3000000000\n",
            f"{FIRST}/memory.usage_in_bytes": "1000000000\n",
            f"{FIRST}/memory.stat": "total_inactive_file 200000000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        3_000_000_000,
        2_200_000_000,
    ),
}


@pytest.mark.parametrize("what", GROUPS)
def test_of_the_memory_of_this_machine(tmp_path: Path, what: str) -> None:
    files, total, available = GROUPS[what]
    root = system(tmp_path, files)
    assert (total_memory(root), available_memory(root)) == (total, available)


@pytest.mark.parametrize("path", ["/docker/1f2e", "/../outside"])
def test_in_a_container_the_tree_begins_at_its_own_group(tmp_path: Path, path: str) -> None:
    root = system(tmp_path, {"proc/self/cgroup": f"0::{path}\n", "sys/fs/cgroup/memory.max": "2000000000\n"})
    assert [group.limit for group in control_groups(root)] == [2_000_000_000]


def test_names_that_the_system_cuts_within_a_character_are_read(tmp_path: Path) -> None:
    file = tmp_path / "proc/meminfo"
    file.parent.mkdir()
    file.write_bytes("Name:\tgrößer".encode()[:-3] + b"\nMemTotal:\t2000 kB\n")
    assert total_memory(tmp_path) == 2_048_000


def test_this_process_has_a_peak_at_least_as_high_as_its_present_size() -> None:
    assert 10 * MB < resident_bytes() <= peak_resident_bytes() <= total_memory()


# -- budgets of memories ---------------------------------------------------------------------------------------


def test_here_budgets_may_exceed_what_was_free_at_the_calibration_but_together_not_what_there_is() -> None:
    tier = UNIFIED.memories["host"]
    machine = replace(UNIFIED, memories=UNIFIED.memories | {"host": replace(tier, capacity=1)})
    assert read_budgets({"host": total_memory()}, machine, here=True) == {"host": total_memory()}
    with pytest.raises(BadInput, match="is more than machine"):
        read_budgets({"host": total_memory() + 1}, machine, here=True)
    half = UNIFIED.memories["host"].nbytes // 2
    assert read_budgets({"host": half}, UNIFIED, processes=2) == {"host": half}
    with pytest.raises(BadInput, match="for each of 2 processes is more than machine"):
        read_budgets({"host": half + 1}, UNIFIED, processes=2)


# -- budgets of the process ------------------------------------------------------------------------------------


def test_the_budget_of_the_process_leaves_the_host_what_its_own_bytes_do_not_take() -> None:
    process = Process(runtime=300 * MB, kernels=50 * MB)
    budgets, limited = within_process({"process": 1000 * MB, "disk": 7}, UNIFIED, process, 1)
    assert budgets == {"disk": 7, "host": 650 * MB - ALLOCATOR_BYTES}
    assert limited == process._replace(limit=1000 * MB)
    assert within_process({"host": 7}, UNIFIED, process, 1) == ({"host": 7}, process)
    given = {"process": 1000 * MB, "gpu": 400 * MB, "pinned": 100 * MB}
    budgets, _ = within_process(given, staged(T4, "1GB"), Process(runtime=300 * MB), 1)
    assert budgets["host"] == 200 * MB - ALLOCATOR_BYTES, "memories of an emulated machine share it"


@pytest.mark.parametrize(
    ("machine", "process", "said"),
    [
        (UNIFIED, Process(runtime=500 * MB), "leaves nothing for weights.* 532 MB for Python.*: give more than 532 MB"),
        (T4, Process(runtime=MB), r"leaves nothing .* and 15.4 GB for gpu: give more than"),
        (staged(T4, "2GB"), Process(runtime=MB), r"leaves nothing .* and 15.4 GB for gpu and 2 GB for pinned: give"),
        (T4, Process(runtime=MB, whole=False), "cannot be kept on machine t4, .*: give host instead"),
    ],
)  # fmt: skip
def test_a_process_budget_that_cannot_be_kept_is_refused(
    machine: Machine, process: Process, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        within_process({"process": 500 * MB}, machine, process, 1)


def test_a_simulation_keeps_the_budget_of_an_assumed_process() -> None:
    report = moesched.simulate_model(
        "mixtral-0.8b",
        machine="cpu-nvme",
        policy="cgopipe",
        workload=[[1] * 20] * 4,
        gen=2,
        budgets={"process": "1.4GB"},
        band=False,
    )
    parts = report.process_bytes
    assert parts is not None and parts.predicted is not None and parts.limit is not None
    assert parts.measured is None
    assert parts.runtime == ASSUMED_RUNTIME
    assert parts.predicted == parts.runtime + parts.plan + parts.allocator + parts.kernels
    assert 0.9 * 1400 * MB < parts.predicted <= parts.limit == 1400 * MB
    assert report.budget_bytes["host"] == 1400 * MB - ASSUMED_RUNTIME - ALLOCATOR_BYTES


def test_a_plan_that_does_not_fit_the_process_s_budget_names_that_budget() -> None:
    with pytest.raises(
        BadInput, match=r"bytes too few, of what --budget process=500 MB leaves: raise --budget"
    ):
        moesched.simulate_model(
            "mixtral-0.8b",
            machine="cpu-nvme",
            policy="resident",
            workload=[[1]],
            budgets={"process": "500MB"},
        )


def test_no_process_is_predicted_where_an_accelerator_has_a_driver_of_its_own() -> None:
    assert not assumed_process(T4).whole
    report = moesched.simulate_model(
        "mixtral-0.8b", machine="t4", policy="cgopipe", workload=[[1]], gen=1, band=False
    )
    assert report.process_bytes is None


def test_a_run_stays_below_the_budget_of_its_process() -> None:
    # Beside libraries whose pages in memory vary with what else runs here; those for CUDA take 2 GB.
    limit = (600 if torch.version.cuda is None else 4_000) * MB
    command = [sys.executable, "-m", "moesched", "run", str(MODEL), "--policy", "cgopipe", "--prompt", "a b"]
    command += ["--max-new-tokens", "4", "--budget", f"process={limit}", "--json"]
    command += ["--device-set", "kernel=torch"]  # the first run on a machine times the other kernels
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    process = json.loads(done.stdout)["process_bytes"]
    assert 100 * MB < process["measured"] <= process["predicted"] <= process["limit"] == limit


# -- memory that the system refuses ----------------------------------------------------------------------------


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def caused_by_itself() -> BaseException:
    error = BadInput("it does not fit")
    return chained(error, error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "cannot allocate memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "cannot allocate memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "can't allocate memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "cuda out of memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "failed to map segment"),
        (chained(TaskFailed("load L0 failed"), MemoryError()), "cannot allocate memory"),
        (ExceptionGroup("lanes", [ValueError(), MemoryError()]), "cannot allocate memory"),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("shapes do not match"), None),
        (BadInput("no memory of that name"), None),
        (caused_by_itself(), None),
    ],
)
def test_a_refusal_of_memory_is_known_by_whoever_tells_it(error: BaseException, said: str | None) -> None:
    assert memory_refusal(error) == said


class NoMemoryToBegin(TorchDevice):
    """A device for whose arenas the system has no memory."""

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


class NoMemoryForKernels(TorchDevice):
    """A device whose kernels get no memory."""

    def execute(self, task: Task) -> Any:
        if task.verb == "attention":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().execute(task)


@pytest.mark.parametrize("device", [NoMemoryToBegin, NoMemoryForKernels])
def test_a_run_without_memory_tells_what_its_plan_takes(device: type[TorchDevice], tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory) as caught:
        moesched.run_model(
            small_model(tmp_path), [[1, 2]], max_new_tokens=2, device=f"{__name__}:{device.__name__}"
        )
    assert re.fullmatch(
        r"out of memory \(can.*t allocate memory\): the plan takes .* \(weights .*, KV cache .*, buffers .*\), "
        r"beside .* of Python and libraries: lower --budget .*",
        str(caught.value),
    )
    report = report_of(caught.value)  # where the run had begun; the command line's exit code is then 1
    assert (report is None) == (device is NoMemoryToBegin)
    assert report is None or report.failure == str(caught.value)


@pytest.mark.parametrize("policy", ["resident", "cgopipe"])
def test_the_contents_of_a_plan_add_up_to_what_it_reserves(policy: str) -> None:
    plan = make_plan(make_policy(policy))
    parts = plan_bytes(plan)
    assert sum(parts.values()) == sum(memory.used for memory in plan.memories.values())
    assert parts["KV cache"] == 4 * 16 * plan.operations.kv_bytes * plan.layout.config.layers, (
        "blocks of 16 tokens"
    )
    assert parts["weights"] >= sum(page.nbytes for page in plan.layout.pages) > parts["buffers"] > 0


def test_a_command_that_may_map_too_little_for_torch_is_refused_before_it_crashes() -> None:
    command = ["run", str(MODEL), "--policy", "resident", "--prompt", "a"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -v 650000; exec "$0" -m moesched "$@"', sys.executable, *command],
        capture_output=True,
        text=True,
    )
    refused(
        Said(done.returncode, done.stdout, done.stderr), r"may map 665 MB \(ulimit -v\).*: raise that limit"
    )
