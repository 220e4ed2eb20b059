"""Calibration: from what was measured to a machine file, and the whole of it on models of a few kilobytes."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import msgspec
import pytest

from moesched.calibration.calibrate import calibrate_into, written_to
from moesched.calibration.exercise import FETCHED_LAYER, Exercise, FinishedTasks, Mode
from moesched.calibration.extent import (
    LARGE,
    QUICK,
    THOROUGH,
    CalibrationExtent,
    OperationExtent,
    Prompts,
    Runs,
    small_model,
)
from moesched.calibration.scaling import scaled_points
from moesched.calibration.timing import measure, undisturbed
from moesched.cli.calibrate import print_unwritten
from moesched.errors import BadInput
from moesched.machines import (
    COST_FORMAT,
    Contention,
    CostPoint,
    Machine,
    load_machine,
    machine_names,
    parse_machine,
)
from moesched.machines.calibrated import Calibrated
from moesched.machines.cost import cost_model
from moesched.machines.toml_text import machine_toml
from moesched.models.config import DType
from moesched.models.layout import DENSE, weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import Batch, split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.tasks import PageTransfer, Task
from traces import largest_file

MODEL = small_model("tiny", hidden=32, intermediate=48, heads=4, head_dim=16, vocabulary=64)
LARGER = small_model("larger", hidden=64, intermediate=64, heads=4, head_dim=16, vocabulary=96)
BETWEEN = small_model("between", hidden=48, intermediate=56, heads=4, head_dim=16, vocabulary=80)

BFLOAT16_RUNS = Runs(models=(MODEL, LARGER), steps=3, resident=2, fresh=1, serial=1, together=1)
QUICKEST = CalibrationExtent(
    name="quickly",
    operations=OperationExtent(
        rounds=1,
        seconds=0.0,
        rows=(1, 2),
        matrices={"bfloat16": ((32, 256),), "float32": ((32, 256),)},
        copies=(4096,),
        reads=(4096, 8192),
        pieces=(1, 2),
        pauses=1,
        stream=1 << 16,
        scratch=1 << 24,
    ),
    batches=(
        Prompts(groups=((3,), (2, 3), (5, 5, 5)), host_attended=(1,)),
        Prompts(groups=((5, 5, 5, 5),), host_attended=(), long=((9,),)),
    ),
    runs={"bfloat16": BFLOAT16_RUNS},
    repeats=0,
)
BOTH_DTYPES = msgspec.structs.replace(
    QUICKEST,
    name="thoroughly",
    runs={
        "bfloat16": BFLOAT16_RUNS,
        "float32": Runs(models=(MODEL, BETWEEN, LARGER), steps=3, resident=2, fresh=1),
    },
)


def exercised(mode: Mode) -> list[Task]:
    """The tasks of four micro-batches on the virtual clock, in the order of their ends."""
    policy, finished = Exercise(mode, turn=0, host_attended=(2, 3)), FinishedTasks()
    batch = Batch((4, 4, 4, 4), 4, ((0,), (1,), (2,), (3,)))
    layout = weight_layout(LARGE, "bfloat16")
    simulate(plan_run(load_machine("cpu-nvme"), layout, batch, policy), policy, observers=[finished])
    return finished.tasks


def test_fresh_weights_come_before_each_micro_batch_and_wait_for_all_that_was_before() -> None:
    tasks = exercised(Mode.FRESH)
    fetches = [each for each in tasks if isinstance(each, PageTransfer) and each.pages[0].expert == DENSE]
    assert len(fetches) == 4 * 4
    for fetch in fetches:
        after = tasks[tasks.index(fetch) + 1]
        assert (after.verb, after.layer) == ("pre_attention", FETCHED_LAYER)
    assert all(before.end <= after.start for before, after in pairwise(tasks))


def test_each_expert_that_is_a_task_runs_right_after_its_fetch_where_weights_are_fresh() -> None:
    tasks = exercised(Mode.FRESH)
    experts = [each for each in tasks if (each.verb, each.layer) == ("run_expert", FETCHED_LAYER)]
    assert experts
    for each in experts:
        before = tasks[tasks.index(each) - 1]
        assert isinstance(before, PageTransfer)
        assert {page.expert for page in before.pages} == {each.expert}


def test_weights_stream_through_both_layers_while_those_before_are_used() -> None:
    tasks = exercised(Mode.STREAMING)
    fetches = [each for each in tasks if each.verb == "fetch"]
    assert [each.layer for each in fetches] == [0, 1] * (4 * 4)
    used = [each for each in tasks if each.verb == "post_attention"]
    for fetch, before, beside in zip(fetches[2:], used[:-2], used[1:-1], strict=True):
        assert before.end <= fetch.start <= beside.start < fetch.end


def test_the_host_attends_beside_the_experts_of_another_micro_batch_and_is_done_before_they_are() -> None:
    tasks = exercised(Mode.ATTENDING)
    attended = [each for each in tasks if each.verb == "cpu_attention"]
    assert len(attended) == 4 * 2 * LARGE.layers
    for each in attended:
        assert any(
            beside.verb == "post_attention" and beside.start <= each.start and each.end <= beside.end
            for beside in tasks
        )


# -- the file


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_is_read_back_from_the_text_that_it_is_written_as(name: str) -> None:
    machine = load_machine(name)
    assert parse_machine(machine_toml(machine).encode(), name) == machine


def test_measured_points_and_odd_names_are_read_back_too() -> None:
    machine = load_machine(machine_names()[0])
    fields = {field: getattr(machine, field) for field in machine.__struct_fields__}
    fields["name"] = 'a "quoted" name, \\ and ünïcode'
    fields["cost_table"] = [CostPoint(operation="route", size=2.5e9, seconds=1e-07, dtype="float32", rows=3)]
    fields["cost_format"] = COST_FORMAT
    fields["contention"] = [Contention(work="few rows", beside="attention", rate=0.5)]
    changed = Machine(**fields)
    assert parse_machine(machine_toml(changed).encode(), "text") == changed


def test_a_measurement_is_a_median_that_leaves_the_first_call_out() -> None:
    calls = count()
    assert measure(lambda: next(calls), seconds=0.0, least=5) < 0.01
    assert next(calls) == 6


def test_a_step_is_done_again_while_others_are_busy_and_tries_are_left() -> None:
    loads = iter([0.5, 0.3, 0.05, 0.7])
    done = count()

    class Others:
        def cores(self) -> float:
            return next(loads)

    taken: list[int] = []
    step = lambda: partial(taken.append, next(done))  # noqa: E731
    assert undisturbed(step, 5, Others) == (0.05, 3)
    assert undisturbed(step, 0, Others) == (0.7, 0)
    assert taken == [2, 3]


def predicts(machine: Machine, dtype: DType) -> bool:
    """Test whether the machine's costs cover runs of several policies."""
    assert isinstance(cost_model(machine, dtype), Calibrated)
    layout = weight_layout(SHAPES["mixtral-0.8b"], dtype)
    seconds = []
    for name in ("resident", "layer_streaming", "cgopipe", "twiddler", "lru_offload", "expert_streaming"):
        policy = make_policy(name)
        plan = plan_run(machine, layout, split_batch([5] * 4, 3, 2), policy, {"host": 8_000_000_000})
        seconds.append(simulate(plan, policy).prefill_seconds)
    return min(seconds) > 0


def test_a_thorough_calibration_measures_both_dtypes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    file = tmp_path / "machine.toml"
    machine = calibrate_into(file, BOTH_DTYPES, lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, len(seen) - 1) and seen[-1] == (len(seen) - 1, len(seen) - 1)
    assert parse_machine(file.read_bytes(), "file") == machine
    assert [path.name for path in tmp_path.iterdir()] == ["machine.toml"]
    assert machine.contention
    for operation in ("read", "disk->host"):
        assert {point.rows for point in machine.cost_table if point.operation == operation} == {1, 2}
    assert {"await", "resume disk->host"} <= {point.operation for point in machine.cost_table}
    assert not any(point.scaled_from for point in machine.cost_table)
    assert "calibrated thoroughly" in machine.description and "scaled" not in machine.description
    assert predicts(machine, "bfloat16") and predicts(machine, "float32")


def test_a_quick_calibration_measures_bfloat16_scales_float32_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    machine = calibrate_into(file, QUICKEST)
    assert parse_machine(file.read_bytes(), "file") == machine
    scaled = [point for point in machine.cost_table if point.scaled_from]
    assert {(point.dtype, point.scaled_from) for point in scaled} == {("float32", "bfloat16")}
    by_themselves = {point.operation for point in machine.cost_table if point.dtype == "float32"}
    assert by_themselves - {point.operation for point in scaled} == {"product"}
    for dtype in ("bfloat16", "float32"):
        timed = {point.format for point in machine.cost_table if point.dtype == dtype}
        assert timed == {"", "q8_0", "q4_k", "q6_k", "mxfp4"} | (
            {"columns"} if dtype == "bfloat16" else set()
        )
    measured = len(machine.cost_table) - len(scaled)
    assert f"{measured} costs measured, {len(scaled)} in float32 scaled from those in" in machine.description
    assert predicts(machine, "bfloat16") and predicts(machine, "float32")


def test_the_quick_extent_is_a_part_of_the_thorough_one() -> None:
    assert QUICK.runs.keys() < THOROUGH.runs.keys()
    for dtype, runs in QUICK.runs.items():
        thorough = THOROUGH.runs[dtype]
        assert runs.models == thorough.models
        assert max(runs.steps, runs.serial, runs.fresh, runs.together) < thorough.steps


def test_costs_are_scaled_by_the_products_of_the_same_matrices() -> None:
    def product(dtype: str, size: float, seconds: float) -> CostPoint:
        return CostPoint(operation="product", dtype=dtype, size=size, seconds=seconds)

    products = [product("bfloat16", 10, 1.0), product("bfloat16", 20, 2.0)]
    products += [product("float32", 20, 1.5), product("float32", 40, 6.0)]
    found = scaled_points(
        [
            CostPoint(operation="route", dtype="bfloat16", size=10, seconds=4.0),
            CostPoint(operation="resident experts", dtype="bfloat16", size=60, seconds=9.0),
            CostPoint(operation="step attention", dtype="bfloat16", size=8, rows=2, seconds=5.0),
            CostPoint(operation="combine", dtype="bfloat16", size=8, seconds=7.0),
            CostPoint(operation="disk->host", size=8, seconds=7.0),
        ],
        products,
        "float32",
    )
    assert [(point.operation, point.size, point.seconds) for point in found] == [
        ("route", 20, 4.0 * 1.5),
        ("resident experts", 120, 9.0 * 3),
        ("step attention", 16, 5.0),
        ("combine", 8, 7.0),
    ]
    assert {(point.dtype, point.scaled_from) for point in found} == {("float32", "bfloat16")}


def test_costs_of_an_older_version_are_refused_with_the_command_that_measures_them_again() -> None:
    machine = msgspec.structs.replace(
        load_machine("cpu-nvme"), cost_format=1, cost_table=[CostPoint(operation="route", size=1, seconds=1)]
    )
    said = (
        "mine.toml: .* in format 1, .* reads 2: measure them again with `moesched calibrate --out mine.toml`"
    )
    with pytest.raises(BadInput, match=said):
        parse_machine(machine_toml(machine).encode(), "mine.toml")
    text = machine_toml(machine).replace("cost_format = 1\n", "")
    with pytest.raises(BadInput, match="in format 0"):
        parse_machine(text.encode(), "mine.toml")


def test_a_calibration_cut_short_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text("old")

    def cut_short(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_into(file, QUICKEST, cut_short)
    assert [path.name for path in tmp_path.iterdir()] == ["machine.toml"]
    assert file.read_text() == "old"


def test_a_run_of_the_calibration_that_is_interrupted_ends_the_calibration(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text("old")
    runs = Runs(models=(MODEL,), steps=2000, resident=1, fresh=0)
    extent = msgspec.structs.replace(QUICKEST, batches=QUICKEST.batches[:1], runs={"bfloat16": runs})

    def interrupt_the_run(done: int, total: int) -> None:
        if done == total - 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        calibrate_into(file, extent, interrupt_the_run)
    assert file.read_text() == "old"


@pytest.mark.parametrize("json", [False, True])
def test_a_machine_that_was_measured_is_printed_where_the_disk_is_full(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, json: bool
) -> None:
    machine = load_machine("t4")
    with largest_file(100), pytest.raises(BadInput, match="cannot write machine file") as full:
        written_to(tmp_path / "machine.toml", "", lambda folder: machine)
    print_unwritten(full.value, json=json)
    text = capfd.readouterr().out
    if json:
        assert msgspec.convert(msgspec.json.decode(text)["machine"], Machine) == machine
    else:
        assert parse_machine(text.encode(), "mine.toml") == machine


def test_a_file_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        BadInput, match=r"cannot write machine file .*machine.toml: .*: a part of its path is a file"
    ):
        calibrate_into(tmp_path / "file" / "machine.toml", QUICKEST)
