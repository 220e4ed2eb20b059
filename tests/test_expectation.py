"""Expectations: what a calibrated machine was to take, beside what a run took."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import moesched
from moesched.devices.lagging.device import LaggingDevice
from moesched.jobs.expectation import extrapolated
from moesched.machines import COST_FORMAT, CostPoint, Machine, load_machine
from moesched.machines.local import assumed_machine, calibrated_file, processor_with, this_processor
from moesched.machines.toml_text import machine_toml
from moesched.models.coded_models import coded_as
from moesched.report.run_figures import expectation_table
from moesched.runs.listeners import Listener
from moesched.system.cores import usable_cores
from moesched.system.signals import Stopped
from moesched.trace import read_trace
from moesched.units import format_seconds
from policies_for_tests import Diary, Once
from small_models import SMALL, small_model

ARGUMENTS = ("--policy", "resident", "--prompt-ids", "1,2,3;4", "--max-new-tokens", 3, "--dtype", "float32")
PROMPTS = ([1, 2, 3], [4, 5], [6])
PRODUCTS = ("pre_attention", "route", "expert", "experts", "sample")
SECONDS = {
    **{name: 0.002 for each in PRODUCTS for name in (each, f"resident {each}")},
    **dict.fromkeys(("attention", "attention call", "step attention", "attention prompt"), 0.001),
    **dict.fromkeys(("embed", "combine"), 0.0005),
    "disk->host": 0.004,
}
"""Of each operation, whatever its size."""


def calibrated(*, only: str = "", **changes: Any) -> Machine:
    """This machine as if it had been measured, as a whole or one operation only."""
    table = [
        CostPoint(operation=operation, size=1, seconds=seconds, dtype="float32")
        for operation, seconds in SECONDS.items()
        if operation == (only or operation)
    ]
    measured = replace(
        assumed_machine(), measured_on=this_processor(), cost_format=COST_FORMAT, cost_table=table
    )
    return replace(measured, **changes)


def run(model: Path, **changes: Any) -> Any:
    """The report of three requests that are predicted."""
    given: dict[str, Any] = {
        "policy": "resident", "machine": calibrated(), "dtype": "float32", "max_new_tokens": 4, "batch_size": 3,
        "micro_batch_size": 2, "expect": True,
    }  # fmt: skip
    return moesched.run_model(model, PROMPTS, **(given | changes))


def test_the_expectation_of_a_run_is_what_simulate_predicts_for_the_experts_that_it_chose(
    model: Path,
) -> None:
    report = run(model)
    chosen = moesched.profile_routing(
        model, PROMPTS, max_new_tokens=4, dtype="float32", batch_size=3, micro_batch_size=2
    )
    predicted = moesched.simulate_model(
        model,
        machine=calibrated(),
        policy="resident",
        workload=PROMPTS,
        dtype="float32",
        gen=4,
        batch_size=3,
        micro_batch_size=2,
        routing=chosen.trace,
    )
    expected = report.as_dict()["expected"]
    assert report.no_expectation is None
    assert expected.keys() == predicted.as_dict().keys()
    for name in ("step_seconds", "load_seconds", "prefill_seconds", "lanes", "tasks", "simulated_seconds"):
        assert expected[name] == predicted.as_dict()[name]
    assert expected["decode_tokens_per_second"] == pytest.approx(predicted.decode_tokens_per_second)
    assert expected["throughput_tokens_per_second"] == pytest.approx(predicted.throughput_tokens_per_second)


def test_the_trace_of_a_run_predicts_only_where_rates_were_measured(model: Path, tmp_path: Path) -> None:
    report = run(model, trace=tmp_path / "measured.json", expect=False)
    assert (report.expected, report.no_expectation) == (None, None), "nobody asked for it"
    run(model, machine=assumed_machine(), trace=tmp_path / "assumed.json")
    measured, assumed = (read_trace(tmp_path / f"{name}.json") for name in ("measured", "assumed"))
    assert measured.recording.predictions and measured.about.roofs
    assert not assumed.recording.predictions and not assumed.about.roofs


@pytest.mark.parametrize("policy", ["expert_streaming", "hybrimoe"])
def test_the_experts_of_an_expectation_are_those_that_the_run_chose(model: Path, policy: str) -> None:
    report = run(model, policy=policy, budgets={"host": "600KB"})
    measured, expected = (
        {kind.lane: kind.tasks for kind in each.kinds if kind.kind == "run_expert"}
        for each in (report, report.expected)
    )
    assert sum(measured.values()) == sum(expected.values()) > 0


def test_a_policy_that_keeps_state_keeps_another_one_for_the_expectation(model: Path) -> None:
    Diary.made.clear()
    run(model, policy="policies_for_tests:Keeping", batch_size=1)
    assert [diary.planned for diary in Diary.made if diary.planned[1:]] == [[0, 1, 2]] * 2


def test_an_expectation_has_as_many_steps_and_tokens_as_the_run(tmp_path: Path) -> None:
    first = run(small_model(tmp_path / "endless"))
    stopping = small_model(tmp_path / "stopping", stop_tokens=tuple({each[1] for each in first.tokens}))
    report = run(stopping, max_new_tokens=50)
    expected = report.expected
    assert len(expected.step_seconds) == len(report.step_seconds) < 50
    counts = list(map(len, report.tokens))
    assert expected.throughput_tokens_per_second == pytest.approx(sum(counts) / sum(expected.step_seconds))
    decoding = sum(expected.step_seconds[1:])
    assert expected.decode_tokens_per_second == pytest.approx((sum(counts) - 3) / decoding)


def test_batches_are_expected_one_by_one_and_together(model: Path) -> None:
    report = run(model, batch_size=1, micro_batch_size=1)
    expected = report.expected
    assert (report.batches, expected.batches) == (3, 3)
    assert len(expected.step_seconds) == len(report.step_seconds) == 12
    assert expected.prefill_seconds == pytest.approx(sum(expected.step_seconds[::4]))
    assert expected.decode_tokens_per_second == pytest.approx(
        9 / (sum(expected.step_seconds) - expected.prefill_seconds)
    )


@pytest.mark.parametrize("batch_size", [3, 1])
def test_an_expectation_has_a_band_around_its_figures(model: Path, batch_size: int) -> None:
    expected = run(model, batch_size=batch_size, micro_batch_size=1).expected
    low, middle, high = expected.band["throughput_tokens_per_second"]
    assert low < middle < high
    assert middle == pytest.approx(expected.throughput_tokens_per_second)
    assert expected.band["prefill_seconds"][1] == pytest.approx(expected.prefill_seconds)


class Estimates(Listener):
    """Writes down the runs for a band, and the ends."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def estimating(self, done: int, total: int) -> None:
        self.heard.append(done)

    def ran(self) -> None:
        self.heard.append("ran")


@pytest.mark.parametrize("band", [True, False])
def test_a_run_tells_of_the_runs_for_its_band_and_ends_again_after_them(model: Path, band: bool) -> None:
    listener = Estimates()
    threads = {"threads": usable_cores()}  # the device's own number may be named
    expected = run(model, listener=listener, band=band, device_settings=threads).expected
    assert listener.heard == ["ran", *range(len(listener.heard) - 2), "ran"]
    assert (len(listener.heard) > 2, expected.band is not None) == (band, band)
    assert len(expected.step_seconds) == 4


class LaggingHere(LaggingDevice):
    """The lagging device, for which a machine file with a GPU is one of this machine."""

    @staticmethod
    def check_machine(machine: Machine) -> None:
        pass


GPU_RUN = {"device": f"{__name__}:LaggingHere", "policy": "resident", "dtype": "bfloat16"}


def calibrated_gpu(**changes: Any) -> Machine:
    """A machine with a GPU as if it had been measured, whose tasks take 3 ms to start."""
    starts = [
        CostPoint(operation=f"dispatch {kind}", resource="gpu", size=0, seconds=0.003)
        for kind in ("embed", "pre_attention", "attention", "post_attention", "sample")
    ]
    measured = {"measured_on": this_processor(), "cost_format": COST_FORMAT, "cost_table": starts}
    return replace(load_machine("h100"), **(measured | changes))


def test_a_run_on_a_gpu_is_predicted_from_a_calibration_with_one(model: Path) -> None:
    report = run(model, machine=calibrated_gpu(), **GPU_RUN)
    assert report.no_expectation is None
    kinds = {kind.kind: kind for kind in report.expected.kinds}
    assert kinds["pre_attention"].seconds == pytest.approx(0.003 * kinds["pre_attention"].tasks)
    assert report.warm_up_seconds and "warm-up" not in expectation_table(report.as_dict())
    assert report.expected.lanes.keys() == report.lanes.keys()


# -- long runs


def test_steps_beyond_those_that_were_simulated_follow_a_line_through_the_later_half() -> None:
    known = [9.0, 7.0, 8.0, 9.0, 1.0, 1.5, 2.0, 2.5, 0.1]
    assert extrapolated(known, 12) == pytest.approx([*known[:-1], 3.0, 3.5, 4.0, 4.5])
    assert extrapolated([9.0, 8.0, 7.0, 6.0, 4.0, 2.0, 1.0, 0.0], 20)[-1] == 0, "never negative"


# -- without an expectation


def test_a_machine_calibrated_without_coded_weights_predicts_none_of_their_runs(tmp_path: Path) -> None:
    folder = small_model(
        tmp_path / "coded", config=coded_as(SMALL.varied(hidden=64, intermediate=64), "q8_0")
    )
    coded = CostPoint(operation="product", size=1, seconds=0.001, dtype="float32", format="q8_0")
    plain = replace(coded, format="")
    machine = calibrated()
    assert "calibrated without coded weights: run `moesched calibrate` again" in run(folder).no_expectation
    table = [*machine.cost_table, coded, plain]
    assert run(folder, machine=replace(machine, cost_table=table)).no_expectation is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": assumed_machine()}, "has no measured costs: calibrate this machine, and omit --machine"),
        ({"machine": "auto"}, "this machine is not calibrated: run `moesched calibrate`"),
        (
            {"machine": calibrated(measured_on="Z80, 1 cores"), "foreign_machine": True},
            "was measured on Z80, 1 cores, and this is",
        ),
        ({"device_settings": {"threads": usable_cores() + 1}}, f"had threads={usable_cores() + 1}$"),
        ({"device_settings": {"direct": False}}, "had direct=False$"),
        ({"machine": calibrated(only="route")}, r"cannot be predicted: machine .* has no cost for 'disk->host'"),
        ({"device": "emulated", "machine": "t4"}, "devices torch and cuda, and this run used emulated$"),
        (
            {"machine": calibrated_gpu(measured_on=processor_with("NVIDIA T4")), "foreign_machine": True, **GPU_RUN},
            f"was measured on {this_processor()}, NVIDIA T4, and this is {this_processor()}",
        ),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_predicted_says_why(model: Path, changes: Any, reason: str) -> None:
    report = run(model, **changes)
    assert report.expected is None
    assert re.search(reason, report.no_expectation)
    assert [len(tokens) for tokens in report.tokens] == [4, 4, 4]


@pytest.mark.parametrize(
    ("error", "reason", "interrupted"),
    [
        (RuntimeError("ran twice\nfor sure"), "it cannot be predicted: ran twice", False),
        (Stopped(), "the prediction was interrupted", True),
    ],
)
def test_a_prediction_that_fails_leaves_the_run_as_it_is(
    model: Path, error: BaseException, reason: str, interrupted: bool
) -> None:
    Once.runs, Once.error = 0, error
    report = run(model, policy="policies_for_tests:Once")
    assert [len(tokens) for tokens in report.tokens] == [4, 4, 4]
    assert (report.expected, report.failure) == (None, None)
    assert (report.no_expectation, report.interrupted) == (reason, interrupted)


# -- what is printed


@pytest.fixture
def calibrated_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is calibrated, for `--machine auto`."""
    monkeypatch.setenv("MOESCHED_CACHE", str(tmp_path))
    calibrated_file().write_text(machine_toml(calibrated()))


@pytest.mark.usefixtures("calibrated_here")
def test_run_and_its_page_show_what_was_expected_beside_what_it_measured(
    command: Any, model: Path, tmp_path: Path
) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    said = command("run", model, *ARGUMENTS, "--report", report)
    assert said.code == 0
    expected = json.loads(report.read_text())["expected"]
    rows = dict(re.findall(r"^(\S.*?)  +(\S.*)$", said.out, re.MULTILINE))
    prefill, busy = (
        format_seconds(seconds)
        for seconds in (expected["prefill_seconds"], expected["lanes"]["accelerator"]["busy_seconds"])
    )
    assert f" {prefill} (" in rows["prefill"]
    assert re.search(rf" {busy} +[\d.]+ %$", rows["accelerator"])
    assert rows["lane"].split() == ["busy", "expected", "in", "use"]
    assert command("run", model, *ARGUMENTS, "--report", page).code == 0
    assert "<h2>Measured beside expected</h2>" in page.read_text()
    assert "accelerator, busy" in page.read_text()


def test_without_a_calibration_run_says_how_to_get_one(command: Any, model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    line = "Not compared with a prediction: this machine is not calibrated: run `moesched calibrate`"
    said = command("run", model, *ARGUMENTS, "--report", page)
    assert said.out.count(line) == 1
    assert line in page.read_text()
    told = command("run", model, *ARGUMENTS, "--json").json
    assert told["expected"] is None
    assert line.endswith(told["no_expectation"].partition(",")[0])


@pytest.mark.parametrize(("dtype", "early"), [("float32", 2), ("bfloat16", 0)])
def test_an_expectation_leaves_out_the_sequences_that_ended_in_the_run(
    tmp_path: Path, dtype: str, early: int
) -> None:
    """A whole micro-batch, or a sequence of one."""
    table = [replace(point, dtype=dtype) for point in calibrated().cost_table]
    given = {"policy": "expert_streaming", "dtype": dtype, "machine": calibrated(cost_table=table)}
    free = run(small_model(tmp_path / "free"), max_new_tokens=8, **given).tokens
    others = {token for request, tokens in enumerate(free) if request != early for token in tokens}
    stop = next(token for token in free[early][:4] if token not in others)
    report = run(small_model(tmp_path / "stopping", stop_tokens=(stop,)), max_new_tokens=8, **given)
    assert list(map(len, report.tokens)) != [8, 8, 8]
    assert report.no_expectation is None
    measured, expected = (
        {
            kind.kind: (kind.tasks, kind.flops)
            for kind in each.kinds
            if kind.kind in ("pre_attention", "route", "sample")
        }
        for each in (report, report.expected)
    )
    assert measured == expected
