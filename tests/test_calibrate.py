"""Calibration: from what was measured to a machine file, and the whole of it on models of a few kilobytes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from functools import partial
from itertools import count, pairwise, permutations
from pathlib import Path

import msgspec
import pytest

from moesched.calibration.calibrate import calibrate_into
from moesched.calibration.contention import Observed, rates_beside
from moesched.calibration.exercise import FETCHED_LAYER, Exercise, FinishedTasks, Mode
from moesched.calibration.extent import (
    LARGE,
    QUICK,
    THOROUGH,
    Extent,
    OperationExtent,
    Prompts,
    Runs,
    small_model,
)
from moesched.calibration.scaling import scaled_points
from moesched.calibration.task_times import TaskTimes
from moesched.calibration.timing import measure, speed_beside, undisturbed
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
from moesched.machines.cost import Calibrated, cost_model
from moesched.machines.toml_text import machine_toml
from moesched.models.config import DType
from moesched.models.layout import weight_layout
from moesched.models.operations import Operations
from moesched.models.shapes import SHAPES
from moesched.models.tensor_sizes import ResidentShare
from moesched.plugins import make_policy
from moesched.requests.batch import Batch, split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.tasks import Kernel, Lane, PageTransfer, Task, Work, WorkPart

MODEL = small_model("tiny", hidden=32, intermediate=48, heads=4, vocabulary=64)
LARGER = small_model("larger", hidden=64, intermediate=64, heads=4, vocabulary=96)
BETWEEN = small_model("between", hidden=48, intermediate=56, heads=4, vocabulary=80)
OPERATIONS = Operations(MODEL, "bfloat16", ResidentShare(0.5, 0.5))
ACCELERATOR, HOST, DISK = Lane("accelerator"), Lane("host"), Lane("disk->host")

BFLOAT16_RUNS = Runs(models=(MODEL, LARGER), steps=3, serial=2, fresh=1, together=1)
QUICKEST = Extent(
    name="quickly",
    operations=OperationExtent(
        rounds=1,
        seconds=0.0,
        rows=(1, 2),
        matrices=((32, 48),),
        copies=(4096,),
        reads=(4096, 8192),
        pieces=(1, 2),
        stream=1 << 16,
        scratch=1 << 24,
        pairs=False,
    ),
    prompts=Prompts(groups=((3,), (2, 3), (5, 5, 5)), long=((9,),), host_attended=(1,)),
    runs={"bfloat16": BFLOAT16_RUNS},
    repeats=0,
)
BOTH_DTYPES = msgspec.structs.replace(
    QUICKEST,
    name="thoroughly",
    operations=msgspec.structs.replace(QUICKEST.operations, pairs=True),
    runs={
        "bfloat16": BFLOAT16_RUNS,
        "float32": Runs(models=(MODEL, BETWEEN, LARGER), steps=3, serial=2, fresh=1),
    },
)

_numbers = count()


def task(
    verb: str,
    start: float,
    end: float,
    *,
    tokens: int = 4,
    lane: Lane = ACCELERATOR,
    layer: int = 0,
    step: int = 1,
) -> Task:
    """A task of the small model that took from `start` to `end` seconds."""
    if verb == "fetch":
        kind: type[Task] = PageTransfer
        work = Work(lane.name, lane.name, nbytes=100, parts=(WorkPart(lane.name, 50, 2),))
    else:
        kind = Kernel
        amount = (
            OPERATIONS.attention([(1, 4)] * tokens)
            if verb in ("attention", "cpu_attention")
            else getattr(OPERATIONS, verb)(tokens)
        )
        work = Work(verb, "cpu", amount.flops, amount.nbytes, tokens, amount.parts)
    made = kind(lane, work, verb, layer, 0, -1, None, step)
    made.id, made.start, made.end = next(_numbers), round(start * 1e9), round(end * 1e9)
    return made


def costs(tasks: Iterable[Task]) -> dict[str, CostPoint]:
    times = TaskTimes()
    times.add(MODEL, "bfloat16", tasks)
    return {point.operation: point for point in times.points()}


# -- tasks to points


def test_a_task_on_weights_that_stay_is_told_from_one_on_weights_that_were_fetched_just_before() -> None:
    times = TaskTimes()
    times.add(MODEL, "bfloat16", [task("route", 0, 0.5, layer=0), task("route", 1, 1.75, layer=1)])
    times.add_fresh(MODEL, "bfloat16", [task("route", 2, 5, layer=0), task("route", 5, 6.25, layer=1)])
    found = {point.operation: point for point in times.points()}
    assert (found["resident route"].seconds, found["route"].seconds) == (0.5, 1.25)
    assert found["route"].rows == 4


def test_what_is_slowed_beside_others_is_held_against_weights_that_were_used_before() -> None:
    times = TaskTimes()
    times.add(MODEL, "bfloat16", [task("route", 0, 3, layer=1)])
    times.add_fresh(MODEL, "bfloat16", [task("route", 0, 4, layer=1)])
    together = [task("route", 0, 4, layer=1), task("fetch", 0, 4, lane=DISK)]
    assert times.rates(MODEL, "bfloat16", together)["few rows", "disk->host"] == pytest.approx(0.75)


def test_the_median_over_several_runs_counts_and_within_a_run_the_mean() -> None:
    times = TaskTimes()
    for ends in ((1.0, 2.0, 9.0), (0.5, 3.0, 4.0), (7.0, 8.0, 9.0)):
        times.add(MODEL, "bfloat16", [task("route", 0, end) for end in ends])
    assert [point.seconds for point in times.points()] == [4.0]


def test_what_experts_take_is_the_rest_of_a_layers_second_half() -> None:
    tasks = [task("route", 0, 0.25), task("combine", 1, 1.125), task("post_attention", 2, 3)]
    experts = costs(tasks)["resident experts"]
    warmed = 8 * (1 - 0.75**4)
    assert experts.seconds == pytest.approx((1 - 0.25 - 0.125) / warmed, rel=1e-3)
    assert experts.rows == pytest.approx(8 / warmed, rel=1e-3)


def test_attention_is_split_into_sequences_calls_and_what_all_have_in_common() -> None:
    times = TaskTimes()
    tasks = []
    for micro_batch, (lengths, seconds) in enumerate([([4], 7.0), ([4, 4, 4], 13.0), ([4, 5, 6], 17.0)]):
        tasks.append(task("attention", 0, seconds))
        tasks[-1].micro_batch = micro_batch
        flops, nbytes, parts = OPERATIONS.attention_step(lengths)
        tasks[-1].work = Work("attention", "cpu", flops, nbytes, len(lengths), parts)
    times.add(MODEL, "bfloat16", tasks)
    found = {point.operation: point.seconds for point in times.points()}
    assert found == {"attention": 2.0, "attention call": 2.0, "step attention": 3.0}


def test_pages_take_as_much_longer_than_reads_as_they_were_seen_to() -> None:
    times = TaskTimes()
    fetch = task("fetch", 0, 3, lane=DISK)
    assert times.longer_than("disk->host", lambda size, rows: 0.5) == 1.0
    times.add(MODEL, "float32", [fetch])
    assert times.longer_than("disk->host", lambda size, rows: 0.5) == 1.0
    times.add(MODEL, "bfloat16", [fetch])
    assert times.longer_than("disk->host", lambda size, rows: size * rows / 50) == 1.5  # 3 s, not 2


# -- what runs at once


def test_how_fast_a_task_goes_on_beside_another_follows_from_how_long_they_overlapped() -> None:
    times = TaskTimes()
    times.add(MODEL, "bfloat16", [task("route", 0, 4), task("fetch", 0, 3, lane=DISK)])
    together = [task("route", 0, 6), task("fetch", 0, 4, lane=DISK)]
    rates = times.rates(MODEL, "bfloat16", together)
    # Of the route's 6 seconds 4 were shared; the other 2 did 2 seconds' work, so the 4 did the other 2.
    assert rates == pytest.approx({("few rows", "disk->host"): 0.5, ("disk->host", "few rows"): 0.75})


def test_attention_on_the_host_is_compared_with_attention_on_the_accelerator() -> None:
    times = TaskTimes()
    times.add(MODEL, "bfloat16", [task("attention", 0, 1), task("route", 1, 2)])
    together = [task("cpu_attention", 0, 2, lane=HOST), task("route", 0, 2)]
    assert times.rates(MODEL, "bfloat16", together) == pytest.approx(
        {("attention", "few rows"): 0.5, ("few rows", "attention"): 0.5}
    )


def test_products_of_few_rows_and_of_many_are_of_different_sorts() -> None:
    times = TaskTimes()
    times.add(MODEL, "bfloat16", [task("attention", 0, 1), task("attention", 1, 2, step=2)])
    few = [task("cpu_attention", 0, 2, lane=HOST), task("post_attention", 0, 2, tokens=8)]
    many = [
        task("cpu_attention", 0, 1.25, lane=HOST, step=2),
        task("post_attention", 0, 2, tokens=256, step=2),
    ]
    assert times.rates(MODEL, "bfloat16", few) == {("attention", "few rows"): pytest.approx(0.5)}
    assert times.rates(MODEL, "bfloat16", many) == {("attention", "many rows"): pytest.approx(0.8)}


def test_attention_over_sequences_of_several_lengths_is_of_a_sort_of_its_own() -> None:
    times = TaskTimes()
    one, several = task("attention", 0, 1), task("attention", 1, 2, step=2)
    work = OPERATIONS.attention_step([4, 5, 6])
    several.work = Work("attention", "cpu", work.flops, work.nbytes, 3, work.parts)
    times.add(MODEL, "bfloat16", [one, several])
    read = task("fetch", 0, 9, lane=DISK)
    slowed = [task("attention", 0, 2), task("attention", 2, 6, step=2), read]
    slowed[1].work = several.work
    assert times.rates(MODEL, "bfloat16", slowed) == {
        ("attention", "disk->host"): pytest.approx(0.5),
        ("attention calls", "disk->host"): pytest.approx(0.25),
    }


def test_of_a_task_beside_one_sort_after_another_each_has_its_rate() -> None:
    times = TaskTimes()
    times.add(
        MODEL, "bfloat16", [task("route", 0, 4), task("combine", 4, 10), task("fetch", 0, 4, lane=DISK)]
    )
    beside_the_fetch = [task("route", 0, 5), task("fetch", 0, 5, lane=DISK)]
    beside_one_after_the_other = [
        task("combine", 10, 20),
        task("fetch", 10, 15, lane=DISK),
        task("cpu_attention", 15, 20, lane=HOST),
    ]
    rates = times.rates(MODEL, "bfloat16", beside_the_fetch + beside_one_after_the_other)
    assert rates["few rows", "disk->host"] == pytest.approx(0.8, rel=0.01)
    assert rates["few rows", "attention"] == pytest.approx(0.4, rel=0.01)


def test_what_runs_beside_at_once_has_a_rate_of_its_own() -> None:
    times = TaskTimes()
    times.add(MODEL, "bfloat16", [task("route", 0, 4)])
    together = [
        task("route", 0, 10),
        task("fetch", 0, 10, lane=DISK),
        task("cpu_attention", 0, 10, lane=HOST),
    ]
    assert times.rates(MODEL, "bfloat16", together) == {
        ("few rows", "attention + disk->host"): pytest.approx(0.4)
    }


def test_rates_bring_the_tasks_to_the_right_sum() -> None:
    """Of tasks that a slow one is among, the mean counts, as the time of their lane is a sum."""
    others = [Observed(1.0, took, {"few rows": took}) for took in (1.0, 1.0, 4.0)]
    assert rates_beside(others) == {"few rows": pytest.approx(3 / 6)}


def test_mixes_that_cannot_be_told_apart_have_one_rate() -> None:
    always_alike = [Observed(1.0, 2.0, {"few rows": 1.9, "attention + few rows": 0.1})] * 5
    rates = rates_beside(always_alike)
    assert rates == pytest.approx({"few rows": 0.5, "attention + few rows": 0.5})


def test_a_mix_that_was_hardly_seen_has_the_rate_of_all() -> None:
    tasks = [Observed(1.0, 2.0, {"few rows": 2.0})] * 9 + [Observed(1e-5, 1e-4, {"attention": 1e-4})]
    assert rates_beside(tasks)["attention"] == pytest.approx(0.5, rel=0.02)


def test_tasks_that_hardly_overlap_say_nothing() -> None:
    times = TaskTimes()
    times.add(MODEL, "bfloat16", [task("route", 0, 4)])
    assert times.rates(MODEL, "bfloat16", [task("route", 0, 4), task("fetch", 3.5, 9, lane=DISK)]) == {}


def exercised(mode: Mode) -> list[Task]:
    """The tasks of four micro-batches on the virtual clock, in the order of their ends."""
    policy, finished = Exercise(mode, turn=0, host_attended=(2, 3)), FinishedTasks()
    batch = Batch((4, 4, 4, 4), 4, ((0,), (1,), (2,), (3,)))
    layout = weight_layout(LARGE, "bfloat16")
    simulate(plan_run(load_machine("cpu-nvme"), layout, batch, policy), policy, observers=[finished])
    return finished.tasks


def test_fresh_weights_come_before_each_micro_batch_and_wait_for_all_that_was_before() -> None:
    tasks = exercised(Mode.FRESH)
    fetches = [each for each in tasks if each.verb == "fetch"]
    assert len(fetches) == 4 * 4
    for fetch in fetches:
        after = tasks[tasks.index(fetch) + 1]
        assert (after.verb, after.layer) == ("pre_attention", FETCHED_LAYER)
    assert all(before.end <= after.start for before, after in pairwise(tasks))


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


def test_the_speed_beside_another_call_is_taken_while_that_is_repeated_and_is_at_most_that_alone() -> None:
    others = count()
    threads = threading.active_count()
    assert 0 < speed_beside(lambda: None, lambda: next(others), seconds=0.01) <= 1
    assert next(others) > 0
    assert threading.active_count() == threads


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
    """Whether the machine's costs cover runs of several policies."""
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
    alone = ("stream", "copy", "gemv", "gemm", "read")
    assert set(permutations(alone, 2)) <= {(pair.work, pair.beside) for pair in machine.contention}
    for operation in ("read", "disk->host"):
        assert {point.rows for point in machine.cost_table if point.operation == operation} == {1, 2}
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_calibration_cut_short_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    file = tmp_path / "machine.toml"
    file.write_text("old")

    def cut_short(done: int, total: int) -> None:
        if done == total // 2:
            raise error

    with pytest.raises(error):
        calibrate_into(file, QUICKEST, cut_short)
    assert [path.name for path in tmp_path.iterdir()] == ["machine.toml"]
    assert file.read_text() == "old"


def test_a_run_of_the_calibration_that_is_interrupted_ends_the_calibration(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text("old")
    runs = Runs(models=(MODEL,), steps=2000, serial=1, fresh=0)
    extent = msgspec.structs.replace(QUICKEST, runs={"bfloat16": runs})

    def interrupt_the_run(done: int, total: int) -> None:
        if done == total - 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        calibrate_into(file, extent, interrupt_the_run)
    assert file.read_text() == "old"


def test_a_file_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"cannot calibrate into .*machine.toml: .*: choose another --out"):
        calibrate_into(tmp_path / "file" / "machine.toml", QUICKEST)
