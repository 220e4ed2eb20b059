"""Jobs from Python: the two calls behind the command line, and what they tell meanwhile."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from msgspec.structs import replace

import moesched
from moesched.analysis.compared_runs import Measure, read_run
from moesched.cli.command import read_table
from moesched.inputs.options import SettingOptions
from moesched.inputs.prompts import Prompt
from moesched.inputs.tokenizer import TOKENIZER_NAME, Tokenizer
from moesched.jobs.batch_reports import NotTraced
from moesched.jobs.report import merge_reports
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.options import described
from moesched.plugins import make_policy
from moesched.runs.listeners import KindMeter, Listener
from moesched.runs.simulation import simulate
from moesched.settings import check_settings
from moesched.steps.plan import Plan
from moesched.system.signals import signals_held
from moesched.tasks import Task
from runs import FORTY_PERCENT, Ended, make_plan
from traces import largest_file


class Diary(Listener):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.loads = 0

    def planned(self, plan: Plan) -> None:
        self.entries.append(("planned", len(plan.batch.prompts)))

    def ended(self, task: Task) -> None:
        self.loads += task.verb == "load"

    def generated(self, request: int, token: int, text: str) -> None:
        self.entries.append((request, token))

    def finished(self, request: int, text: str) -> None:
        self.entries.append(("finished", request))

    def ran(self) -> None:
        self.entries.append("ran")


def test_a_listener_hears_of_every_token_by_the_number_of_its_prompt(model: Path) -> None:
    diary = Diary()
    report = moesched.run_model(
        model, [[1], "ab", [2, 3]], policy="resident", max_new_tokens=2, batch_size=2, listener=diary
    )
    a, b, c = report.tokens or []
    assert diary.entries == [
        ("planned", 2), (0, a[0]), (1, b[0]), (0, a[1]), ("finished", 0), (1, b[1]), ("finished", 1), "ran",
        ("planned", 1), (2, c[0]), (2, c[1]), ("finished", 2), "ran",
    ]  # fmt: skip
    assert diary.loads == 2 * report.plan.resident_pages
    assert report.batches == 2
    assert len(report.step_seconds) == 4
    assert report.throughput_tokens_per_second == pytest.approx(6 / sum(report.step_seconds))
    assert sum(kind.tasks for kind in report.kinds) == report.tasks
    assert [kind.tasks for kind in report.kinds if kind.kind == "sample"] == [4]


@pytest.mark.parametrize(
    ("policy", "direct"),
    [("resident", True), ("cgopipe", True), ("cgopipe", False), ("layer_streaming", False)],
)
def test_weights_that_stay_are_read_once_for_all_batches(model: Path, policy: str, direct: bool) -> None:
    def read(prompts: int) -> int:
        report = moesched.run_model(
            model,
            [[1, 2]] * prompts,
            policy=policy,
            max_new_tokens=2,
            batch_size=2,
            budgets={"host": "400KB"} if policy != "resident" else None,
            device_settings={"direct": direct},
        )
        assert report.batches == prompts // 2
        streams.add(report.plan.resident_pages < pages)
        return report.bytes_read or 0

    streams: set[bool] = set()
    pages = len(weight_layout(open_checkpoint(model).config).pages)
    one, two, three = (read(prompts) for prompts in (2, 4, 6))
    assert streams == {policy != "resident"}
    assert three - two == two - one
    streamed = two - one
    assert streamed == 0 if policy == "resident" else 0 < streamed < one - globals_bytes(model)


def globals_bytes(model: Path) -> int:
    return weight_layout(open_checkpoint(model).config).globals_bytes


@pytest.mark.parametrize("policy", ["resident", "cgopipe"])
def test_batches_on_one_device_give_what_they_give_alone(model: Path, policy: str) -> None:
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    sizes: dict[str, Any] = {
        "policy": policy,
        "budgets": {"host": "1MB"},
        "max_new_tokens": 4,
        "batch_size": 2,
    }
    together = moesched.run_model(model, prompts, **sizes).tokens or []
    alone = [moesched.run_model(model, prompts[at : at + 2], **sizes).tokens or [] for at in (0, 2)]
    assert together == alone[0] + alone[1]


def test_a_prediction_of_given_lengths_plans_what_the_run_does(model: Path) -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    sizes: dict[str, Any] = {
        "policy": "cgopipe",
        "budgets": {"host": "2MB"},
        "micro_batch_size": 2,
        "batch_size": 3,
    }
    measured = moesched.run_model(model, prompts, max_new_tokens=4, **sizes)
    predicted = moesched.simulate_model(
        model, machine="auto", workload=moesched.given_lengths([3, 1, 2], 4), band=False, **sizes
    )
    assert predicted.plan.micro_batch_size == measured.plan.micro_batch_size == 2
    assert predicted.lanes.keys() == measured.lanes.keys()
    assert {kind.kind for kind in predicted.kinds} == {kind.kind for kind in measured.kinds}
    assert (predicted.measured, measured.measured) == (False, True)


def predict(workload: Any, **more: Any) -> moesched.JobReport:
    settings: dict[str, Any] = {"machine": "t4", "policy": "cgopipe", "gen": 3, "band": False} | more
    return moesched.simulate_model("mixtral-0.8b", workload=workload, **settings)


def test_a_workload_without_a_count_is_one_full_batch_and_listed_prompts_run_once_each() -> None:
    report = predict("mtbench", budgets={"gpu": "1.2GB", "host": "3GB"})
    assert report.batches == 1
    assert 10 < report.plan.batch_size < 4096, "as many as the host's memory has room for"
    assert predict("mtbench", batch_size=6).plan.batch_size == 6
    listed = moesched.given_lengths([9, 30, 4], 3)
    assert predict(listed, batch_size=8).plan.batch_size == 3
    assert predict(listed, batch_size=2).batches == 2
    assert predict(listed, batch_size=8, requests=8).plan.batch_size == 8


def test_requests_beyond_the_batch_run_in_the_next_ones() -> None:
    report = predict("mtbench", requests=10, batch_size=4)
    assert (report.plan.batch_size, report.batches) == (4, 3)
    assert report.throughput_tokens_per_second == pytest.approx(30 / sum(report.step_seconds))
    assert report.decode_tokens_per_second == pytest.approx(
        20 / sum(sum(report.step_seconds[start + 1 : start + 3]) for start in (0, 3, 6))
    )
    assert report.simulated_seconds == pytest.approx(report.load_seconds + sum(report.step_seconds))


def test_a_report_names_the_kernels_of_all_batches() -> None:
    report = moesched.simulate_model(
        "mixtral-8x7b", machine="l4", policy="cgopipe", workload=[[1]], gen=1, batch_size=1
    )
    one, other = (
        replace(report, kernels=each) for each in ({"a": ["x", "y"]}, {"a": ["w", "y"], "b": ["z"]})
    )
    assert merge_reports([one, other], requests=2, batches=2).kernels == {"a": ["w", "x", "y"], "b": ["z"]}


def test_the_decode_step_of_several_batches_has_no_later_batch_s_prefill(tmp_path: Path) -> None:
    report = predict("mtbench", requests=10, batch_size=4, band=True)
    decode = fmean(seconds for step, seconds in enumerate(report.step_seconds) if step % 3)
    assert report.decode_step_seconds == pytest.approx(decode)
    assert report.band is not None and report.band["decode_step_seconds"][1] == pytest.approx(decode)
    moesched.write_report(tmp_path / "report.json", report)
    compared = read_run(tmp_path / "report.json").values
    assert compared[Measure("total", "decode step", "time", "s")] == pytest.approx(decode)


def test_successive_predicted_batches_are_those_predicted_alone() -> None:
    lengths = [9, 30, 4, 17, 8]
    whole = predict(moesched.given_lengths(lengths, 3), batch_size=3)
    parts = [predict(moesched.given_lengths(part, 3), batch_size=3) for part in (lengths[:3], lengths[3:])]
    assert whole.step_seconds == [seconds for part in parts for seconds in part.step_seconds]
    assert whole.tasks == sum(part.tasks for part in parts)


def test_a_padded_prediction_is_that_of_the_longest_prompts() -> None:
    padded = predict("mtbench", batch_size=8, padded=True)
    longest = predict(moesched.given_lengths([418] * 8, 3), batch_size=8)
    assert padded.step_seconds == longest.step_seconds
    assert padded.as_dict()["padded"] is True
    assert predict("mtbench", batch_size=8).prefill_seconds < padded.prefill_seconds


def test_the_prompts_of_a_run_are_a_workload(model: Path) -> None:
    prompts: list[Prompt] = ["abc", [1, 2]]
    lengths = moesched.given_lengths([len(Tokenizer(model / TOKENIZER_NAME).encode("abc")), 2], 3)
    given: dict[str, Any] = {"machine": "t4", "policy": "cgopipe", "gen": 3, "band": False}
    of_prompts = moesched.simulate_model(model, workload=prompts, **given)
    assert of_prompts.step_seconds == moesched.simulate_model(model, workload=lengths, **given).step_seconds


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ([], "no prompts were given: give at least one"),
        (["abc"], "prompts are text, and model mixtral-0.8b has no tokenizer: name a model's folder"),
        ([[1, 40000]], "prompt 0: token id 40000 is outside the vocabulary"),
        ([[1] * 32767], "a prompt of 32767 tokens and 3 new ones are more than the context"),
        ("prompts.jsonl", r"prompts\.jsonl:2: "),
    ],
)
def test_a_workload_that_cannot_be_predicted_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt_ids": [1, 2]}\n{\n')
    with pytest.raises(moesched.BadInput, match=said):
        predict(workload)
    if workload == []:
        with pytest.raises(moesched.BadInput, match=said):
            moesched.run_model(model, [])


def test_a_replayed_prediction_counts_the_same_tasks_as_one_that_is_driven() -> None:
    counted = []
    for replay in (False, True):
        policy, meter, diary, seen = make_policy("cgopipe"), KindMeter(), Diary(), Ended()
        plan = make_plan(policy, new_tokens=9, budgets=FORTY_PERCENT)
        simulate(plan, policy, sharing=False, replay=replay, observers=[meter, diary, seen])
        starts = sorted((task.start, task.lane.name, task.verb) for task in seen.tasks)
        counted.append((meter.kinds(), diary.loads, starts))
    assert counted[0] == counted[1]


def test_a_trace_that_cannot_be_written_does_not_cost_the_report(model: Path, tmp_path: Path) -> None:
    with largest_file(4096), pytest.raises(NotTraced, match=r"cannot write trace .*File too large") as caught:
        moesched.run_model(model, [[1]], policy="resident", max_new_tokens=2, trace=tmp_path / "trace.json")
    assert caught.value.report.tokens == moesched.run_model(model, [[1]], max_new_tokens=2).tokens


def test_settings_are_read_as_what_the_policy_takes() -> None:
    texts = ["count=007", "share=1e-3", "name=1e3", "maybe=true", "keep=true", "any=1e3"]
    table = read_table(described(SettingOptions)["settings"], texts)
    assert check_settings(Taking, "policy taking", table) == {
        "count": 7, "share": 0.001, "name": "1e3", "maybe": "true", "keep": True, "any": 1000.0
    }  # fmt: skip


def test_a_setting_may_be_empty_or_have_an_equals_sign() -> None:
    texts = ["a=3", "b=-0.5", "c=some text=here", "d="]
    expected = {"a": 3, "b": -0.5, "c": "some text=here", "d": ""}
    assert read_table(described(SettingOptions)["settings"], texts) == expected


class Taking:
    def __init__(
        self,
        count: int = 1,
        share: float = 0.5,
        name: str = "",
        maybe: str | None = None,
        keep: bool = False,
        any: Any = 0,
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({"count": 2}, {"count": 2}),
        ({"share": 1}, {"share": 1}),
        ({"name": 7}, {"name": "7"}),
        ({"any": "x"}, {"any": "x"}),
        ({"count": 2.5}, "policy taking: count is 2.5: give a whole number"),
        ({"count": True}, "policy taking: count is True: give a whole number"),
        ({"share": "half"}, "policy taking: share is 'half': give a number"),
        ({"keep": 1}, "policy taking: keep is 1: give true or false"),
        ({"size": 1}, "policy taking has no setting 'size': it takes count, share, name, maybe, keep, any"),
    ],
)
def test_a_policy_gets_settings_of_the_types_that_it_names_and_others_are_told(
    settings: Any, taken: Any
) -> None:
    told = isinstance(taken, str)
    with pytest.raises(moesched.BadInput, match=taken) if told else nullcontext():
        assert check_settings(Taking, "policy taking", settings) == taken


def test_ctrl_c_is_held_back_until_the_moment_is_over() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
