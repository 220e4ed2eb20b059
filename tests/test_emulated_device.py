"""The emulated accelerator: the torch device's tokens, in the time and with the overlap of another machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import pytest

import moesched
from moesched.cli.main import main
from moesched.devices.emulated.device import EmulatedDevice
from moesched.devices.emulated.dilated_clock import DilatedClock, Pace
from moesched.devices.emulated.dilation import least_dilation
from moesched.devices.emulated.rehearsal import Rehearsed, rehearse
from moesched.errors import BadInput
from moesched.machines import Machine, parse_machine
from moesched.machines.roofline import Roofline
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.runs.hardware import run
from moesched.runs.outcome import Report
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Dilations, ignore_progress
from moesched.steps.plan import Plan
from moesched.testing import check_device
from moesched.trace import Recorder, Slice
from moesched.transports.inproc import InprocTransport
from moesched.work import Work
from odd_models import GLM, stored
from small_models import SMALL, small_model

NAME = "moesched.devices.emulated.device:EmulatedDevice"

MACHINE = b"""
name = "slow accelerator"
memories.gpu = { capacity = "1GB", bandwidth = 1e9 }
memories.host = { capacity = "1GB", bandwidth = 1e9 }
memories.pinned = { capacity = "1GB", bandwidth = 1e9 }
processors.gpu = { memory = "gpu", launch_seconds = 5e-4, flops = { float32 = 1e12, bfloat16 = 1e12 } }
processors.cpu = { memory = "host", launch_seconds = 5e-4, flops = { float32 = 1e11, bfloat16 = 1e11 } }
links = [
    { source = "pinned", destination = "gpu", bandwidth = 2.5e7, latency = 2e-4, path = "host->gpu" },
    { source = "host", destination = "gpu", bandwidth = 2.5e7, latency = 2e-4 },
    { source = "gpu", destination = "host", bandwidth = 2.5e7, latency = 2e-4 },
    { source = "host", destination = "pinned", bandwidth = 1e8, latency = 2e-4 },
]
roles = { accelerator = "gpu", host = "cpu", weights = "host", pinned = "pinned" }
"""

CONFIG = SMALL.varied(layers=3)
PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5, 6, 7], [90], [11, 12], [13, 14, 15]]
TIGHT = {"gpu": 400_000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "model", config=CONFIG)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    return open_checkpoint(model)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return parse_machine(MACHINE, "the test's machine")


@pytest.fixture(scope="module")
def machine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machines") / "slow.toml"
    path.write_bytes(MACHINE)
    return path


def plan_of(machine: Machine, device: Any, policy: Any, budgets: Mapping[str, int]) -> Plan:
    batch = split_batch([len(prompt) for prompt in PROMPTS], 4, 2)
    return plan_run(machine, device.layout, batch, policy, budgets, device.slot_bytes)


def run_on(device: Any, machine: Machine, recorder: Any = None) -> Report:
    policy = make_policy("cgopipe")
    plan = plan_of(machine, device, policy, TIGHT)
    return run(plan, policy, device, PROMPTS, recorder=recorder)


def emulated(checkpoint: Checkpoint, **settings: Any) -> EmulatedDevice:
    return EmulatedDevice(checkpoint, weight_layout(checkpoint.config, "float32"), **settings)


class Watched(msgspec.Struct):
    """A run, its tasks, and the machine that it was meant for."""

    report: Report
    slices: list[Slice]
    machine: Machine


@pytest.fixture(scope="module")
def piped(checkpoint: Checkpoint, machine: Machine) -> Watched:
    """CGOPipe on the emulated machine, in time slow enough for a busy one."""
    recorder = Recorder()
    report = run_on(emulated(checkpoint, dilation=8.0), machine, recorder)
    return Watched(report, recorder.recording().slices, machine)


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_it_passes_the_suite_of_devices(machine: Machine) -> None:
    def make(checkpoint: Checkpoint, layout: Any) -> EmulatedDevice:
        return EmulatedDevice(checkpoint, layout, dilation=1.0)

    check_device(make, machine)


# -- whose time it takes -----------------------------------------------------------------------------------------------


def test_no_task_takes_less_than_the_emulated_machine_would(piped: Watched) -> None:
    cost = Roofline(piped.machine, "float32")
    assert {each.task.verb for each in piped.slices} >= {
        "copy_to_pinned",
        "fetch",
        "offload_qkv",
        "cpu_attention",
        "load_hidden",
    }
    for each in piped.slices:
        work = Work(each.task.kind, each.task.resource, each.task.flops, each.task.nbytes)
        assert each.end - each.start >= round(cost.work(work).seconds * 1e9), each.task.label
    links = {f"{link.source}->{link.destination}": link for link in piped.machine.links}
    transfers = [each for each in piped.slices if each.task.resource in links]
    assert transfers
    for each in transfers:
        assert each.task.nbytes / ((each.end - each.start) / 1e9) <= links[each.task.resource].bandwidth


def test_accelerator_host_and_a_link_work_at_the_same_moment(piped: Watched) -> None:
    def running(moment: int) -> set[str]:
        return {each.lane.name for each in piped.slices if each.start <= moment < each.end}

    together = [running(each.start) for each in piped.slices if each.step > 0]
    assert any({"accelerator", "host"} < lanes for lanes in together)
    busy = sum(lane.busy_seconds for lane in piped.report.lanes.values())
    assert busy > sum(piped.report.step_seconds)


def test_it_is_as_fast_as_the_simulation_of_the_same_plan_at_best_and_tells_how_it_kept_up(
    checkpoint: Checkpoint, machine: Machine, piped: Watched
) -> None:
    policy = make_policy("cgopipe")
    predicted = simulate(plan_of(machine, emulated(checkpoint), policy, TIGHT), policy)
    assert sum(predicted.step_seconds) <= sum(piped.report.step_seconds) <= 3 * sum(predicted.step_seconds)
    for name, lane in predicted.lanes.items():
        assert lane.busy_seconds <= piped.report.lanes[name].busy_seconds
    emulation = piped.report.emulation
    assert emulation is not None
    assert emulation.core_load > 0
    assert set(emulation.lanes) == {"accelerator", "host", "host->gpu", "gpu->host", "host->pinned"}
    for kept in emulation.lanes.values():
        assert kept.real_share > 0
        assert kept.late <= kept.overruns
        assert kept.excess_seconds >= 0


# -- dilation ----------------------------------------------------------------------------------------------------------


def busy(real: float, modelled: float) -> list[Rehearsed]:
    """A lane that is idle, and one with some real work in this time."""
    lanes = [Rehearsed("idle", "fetch", 1e-9, 1.0), Rehearsed("busy", "embed", 0.0, 0.5 * modelled)]
    return [*lanes, Rehearsed("busy", "sample", real, 0.5 * modelled)]


@pytest.mark.parametrize(
    ("rehearsed", "least"),
    [
        (busy(1.0, 100.0), 1.0),
        (busy(1.0, 4.0), 1.0),
        (busy(1.0, 1.0), 4.0),
        (busy(9.0, 1.0), 40.0),
        ([Rehearsed("a", "sample", 0.0, 9.0), Rehearsed("a", "embed", 3.0, 1.0)], 6.0),
        ([Rehearsed("a", "sample", 0.0, 9.0), Rehearsed("a", "embed", 0.04, 0.001)], 1.0),  # it hardly counts
    ],
)
def test_dilation_leaves_real_work_a_quarter_of_the_worst_lane_and_half_of_each_operation(
    rehearsed: list[Rehearsed], least: float
) -> None:
    assert least_dilation(rehearsed) == least


@pytest.mark.parametrize(
    ("policy", "verbs"),
    [
        ("cgopipe", {"copy_to_pinned", "offload_qkv", "cpu_attention", "load_hidden", "post_attention", "run_expert"}),
        ("resident", {"copy_to_pinned", "attention", "post_attention", "sample"}),
    ],
)  # fmt: skip
def test_a_rehearsal_sees_the_verbs_that_the_plan_needs(
    checkpoint: Checkpoint, machine: Machine, policy: str, verbs: set[str]
) -> None:
    device = emulated(checkpoint)
    plan = plan_of(machine, device, make_policy(policy), {})
    told: list[tuple[str, float, float]] = []
    cost = Roofline(machine, "float32")
    rehearsed = rehearse(checkpoint, device.layout, plan, cost, lambda *progress: told.append(progress))
    assert [each[:2] for each in told] == [
        ("rehearsing on this machine", done + 1) for done in range(len(told))
    ]
    (expected,) = {each[2] for each in told}
    assert 0.5 < len(told) / expected < 2
    assert {each.verb for each in rehearsed["decode"]} >= verbs
    assert all(each.real > 0 and each.modelled > 0 for kind in rehearsed.values() for each in kind)


def test_a_rehearsals_tokens_are_routed_to_more_experts_than_one_token_would_be(
    checkpoint: Checkpoint, machine: Machine
) -> None:
    device = emulated(checkpoint)
    plan = plan_of(machine, device, make_policy("resident"), {})
    prefill = rehearse(checkpoint, device.layout, plan, Roofline(machine, "float32"), ignore_progress)[
        "prefill"
    ]
    modelled = {
        each.verb: each.modelled for each in prefill
    }  # here nearly all of it is the time per operation
    assert modelled["run_expert"] > (CONFIG.routed.top_k + 0.5) * modelled["route"]


def test_a_rehearsal_of_a_model_whose_first_layer_has_no_experts_runs_experts(
    machine: Machine, tmp_path: Path
) -> None:
    checkpoint = stored(GLM, tmp_path)
    device = emulated(checkpoint)
    plan = plan_of(machine, device, make_policy("cgopipe"), {})
    rehearsed = rehearse(checkpoint, device.layout, plan, Roofline(machine, "float32"), ignore_progress)
    assert {"run_expert", "post_attention"} <= {each.verb for each in rehearsed["decode"]}


@pytest.mark.parametrize("given", [{}, {"dilation": 3.0}])
def test_a_given_dilation_is_taken_and_else_the_least_that_a_rehearsal_asks_for(
    checkpoint: Checkpoint, machine: Machine, given: dict[str, float]
) -> None:
    report = run_on(emulated(checkpoint, **given), machine)
    assert report.emulation is not None
    dilation = report.emulation.dilation
    assert dilation.prefill >= 1 and dilation.decode >= 1
    if given:
        assert (dilation.prefill, dilation.decode) == (3.0, 3.0)
    assert report.wall_seconds >= min(dilation.prefill, dilation.decode) * sum(report.step_seconds)


def test_the_clock_stands_until_it_runs_and_does_not_jump_when_its_pace_changes() -> None:
    clock = DilatedClock()
    assert clock.now() == clock.now() == 0
    start = perf_counter_ns()
    clock.run(1000.0)
    before = clock.now()
    assert before <= (perf_counter_ns() - start) / 1000
    clock.run(10.0)
    assert before <= clock.now() <= (perf_counter_ns() - start) / 10
    start, moment = perf_counter_ns(), clock.now() + 250_000
    clock.wait_until(moment)
    assert clock.now() >= moment
    assert perf_counter_ns() - start >= 10 * 250_000


def test_the_pace_is_that_of_decode_from_the_last_prompt_on() -> None:
    clock = DilatedClock()
    pace = Pace(clock, Dilations(prefill=8.0, decode=2.0), prompts=2)
    dilations = [clock.dilation]
    for _ in range(2):
        pace.count_prefilled()
        dilations.append(clock.dilation)
    assert dilations == [8.0, 8.0, 2.0]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dilation", [0.5, -2.0, float("nan"), float("inf")])
def test_time_cannot_run_faster_than_ours_nor_stand(checkpoint: Checkpoint, dilation: float) -> None:
    with pytest.raises(BadInput, match=rf"dilation is {dilation:g}: give 1 or more"):
        emulated(checkpoint, dilation=dilation)


def test_several_machines_cannot_be_imitated(checkpoint: Checkpoint) -> None:
    device = emulated(checkpoint)
    with pytest.raises(BadInput, match="one machine, not several nodes"):
        device.join(0, InprocTransport(2), device)


def test_memories_that_this_machine_cannot_hold_and_one_memory_for_all_are_refused(
    checkpoint: Checkpoint, machine: Machine
) -> None:
    device, policy = emulated(checkpoint), make_policy("resident")
    plan = plan_of(machine, device, policy, {"host": 10**18})
    plan.memory("host").reserve("more than anybody has", 10**17)
    with pytest.raises(BadInput, match=r"the plan takes .* of machine slow accelerator"):
        device.begin(plan, PROMPTS, Sampling())
    roles = msgspec.structs.replace(machine.roles, accelerator="cpu")
    with pytest.raises(BadInput, match="has one memory for accelerator and host"):
        EmulatedDevice.check_machine(msgspec.structs.replace(machine, roles=roles))


# -- the command line --------------------------------------------------------------------------------------------------


def arguments(model: Path, machine: Path | str, device: str = NAME) -> list[str]:
    common = ["--policy", "layer_streaming", "--prompt-ids", "1,2;3", "--max-new-tokens", "2"]
    return ["run", str(model), *common, "--device", device, "--machine", str(machine)]


def test_a_run_says_that_its_machine_is_emulated(
    model: Path, machine_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "run.json"
    extra = ["--device-set", "dilation=2", "--budget", "gpu=400KB", "--trace", str(trace)]
    assert main([*arguments(model, machine_file), *extra]) == 0
    printed = capsys.readouterr().out
    assert "measured on slow accelerator (emulated, time dilated by 2)" in printed
    assert "the cores were" in printed
    assert moesched.check_trace(trace) == []
    assert moesched.read_trace(trace).about.machine == "slow accelerator (emulated, time dilated by 2)"


def test_batches_of_an_emulated_run_add_up(
    model: Path, machine_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch-size", "1", "--device-set", "dilation=2", "--json"]
    assert main([*arguments(model, machine_file), *sizes]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["batches"] == 2
    assert report["emulation"]["dilation"] == {"prefill": 2.0, "decode": 2.0}
    assert report["emulation"]["lanes"]["accelerator"]["real_share"] > 0


@pytest.mark.parametrize(
    ("device", "machine", "said"),
    [
        ("torch", "t4", "machine t4 describes other hardware .* use --device emulated to imitate it"),
        (NAME, "auto", "device emulated imitates another machine: name it with --machine"),
    ],
)
def test_a_machine_that_is_not_the_devices_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], device: str, machine: str, said: str
) -> None:
    assert main(arguments(model, machine, device)) == 2
    assert re.search(said, capsys.readouterr().err)
