"""The changes that would help a run: what they save, against replays of the whole run, and where they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from commands import EXPLAINED
from moesched.analysis.explanation import explain
from moesched.analysis.helps import LEAST_SAVED, MOST_HELPS, Help
from moesched.analysis.what_if import what_if
from moesched.jobs.explained import explained
from moesched.plugins import make_policy
from moesched.runs.simulation import simulate
from moesched.trace import About, FirstSteps, Recorder, Recording
from runs import FORTY_PERCENT, make_plan, predicted, realtime_run, virtual_run

pytestmark = pytest.mark.usefixtures("as_users_run")

ABOUT = About(driver="virtual", policy="P", machine="t4", model="m")


def recorded(policy: str, recorder: Recorder, *, replay: bool = False) -> Recording:
    """A run of twelve decode steps."""
    chosen = make_policy(policy)
    plan = make_plan(chosen, budgets=FORTY_PERCENT, requests=8, new_tokens=13)
    simulate(plan, chosen, recorder=recorder, replay=replay)
    return recorder.recording()


@pytest.mark.parametrize("policy", ["cgopipe", "layer_streaming", "expert_cache", "prefetch_gate"])
def test_the_first_steps_tell_the_whole_run_s_bottleneck_and_what_it_would_save(policy: str) -> None:
    whole = recorded(policy, Recorder())
    run, few = explain(whole, ABOUT), explain(recorded(policy, FirstSteps(3)), ABOUT, decode_steps=12)
    assert run.bottleneck is not None
    assert few.bottleneck is not None
    assert few.seconds == pytest.approx(run.seconds, rel=0.05)
    assert few.bottleneck.lane == run.bottleneck.lane
    assert few.bottleneck.share == pytest.approx(run.bottleneck.share, abs=0.1)
    first = few.helps
    assert 1 <= len(first) <= MOST_HELPS
    changes = [each.command.split('"')[1] for each in first]
    answers = what_if(whole, changes)
    for said, answer in zip(first, answers, strict=True):
        assert said.saved == pytest.approx(1 - 1 / answer.speedup, abs=0.05)
        assert said.saved >= LEAST_SAVED
    assert [each.saved for each in first] == sorted((each.saved for each in first), reverse=True)


def test_a_short_run_is_replayed_whole() -> None:
    whole = recorded("cgopipe", Recorder())
    explained = explain(whole, ABOUT)
    for said in explained.helps:
        [answer] = what_if(whole, [said.command.split('"')[1]])
        assert said.saved == pytest.approx(1 - 1 / answer.speedup)
        assert said.sentence.endswith(f"would save {said.saved:.0%} of the time")


@pytest.mark.parametrize("replay", [False, True])
def test_a_recorder_of_first_steps_keeps_those_of_the_whole_run_and_no_others(replay: bool) -> None:
    whole = recorded("cgopipe", Recorder(), replay=replay)
    first = recorded("cgopipe", FirstSteps(3), replay=replay)
    kept = [each for each in whole.slices if each.step < 3]
    assert [(each.id, each.start, each.end) for each in first.slices] == [
        (each.id, each.start, each.end) for each in kept
    ]
    assert max(each.step for each in first.slices) == 2


def test_time_between_tasks_is_among_what_would_help_a_measured_run() -> None:
    run = realtime_run("layer_streaming", budgets=FORTY_PERCENT)
    for each in run.recording.slices:
        each.end = each.start + 1  # on a busy machine one may have taken long
    said = explain(run.recording, run.about).helps
    assert "No time between tasks" in [each.change for each in said]


def test_decisions_that_were_held_are_told() -> None:
    deciding, fixed = (
        explain(virtual_run(policy, budgets=FORTY_PERCENT).recording, ABOUT).helps
        for policy in ("expert_cache", "cgopipe")
    )
    assert {each.decisions_unchanged for each in deciding} == {True}
    assert {each.decisions_unchanged for each in fixed} == {False}


def test_simulate_names_a_much_faster_policy_with_sizes_that_give_its_rate(command: Any) -> None:
    job = (*EXPLAINED, "--gen", 8, "--json")
    slow = command(*job, "--policy", "layer_streaming", "--batch-size", 4).json
    [faster] = [each for each in slow["helps"] if each["command"].startswith("simulate")]
    fast = command(*job, *faster["command"].removeprefix("simulate ... ").split()).json
    saved = 1 - slow["throughput_tokens_per_second"] / fast["throughput_tokens_per_second"]
    assert saved == pytest.approx(faster["saved"], abs=0.1)


def test_no_other_policy_is_looked_for_after_a_run_that_ended_early() -> None:
    report, recording = predicted("resident"), virtual_run("resident").recording
    looked: list[None] = []

    def look() -> list[Help]:
        looked.append(None)
        return []

    for early in (replace(report, failure="no room"), replace(report, interrupted=True)):
        assert explained(early, recording, ABOUT, look) == (early, None)
    assert not looked
    assert explained(report, recording, ABOUT, look)[1] is not None
    assert looked


def test_run_and_simulate_show_the_bottleneck_and_what_would_help(
    command: Any, no_text: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    job = (*EXPLAINED, "--policy", "cgopipe", "--batch-size", 2, "--gen", 4)
    predicted = command(*job, "--report", page)
    run = ("run", no_text, "--policy", "resident", "--prompt-ids", "1,2", "--max-new-tokens", 4)
    measured = command(*run)
    for said in (predicted.out, measured.out):
        assert "\nbottleneck: " in said
        assert "\nWhat would help\n" in said
        assert "would save" in said
        assert ("explain TRACE" in said) == (
            "\nTRACE is the file that --trace of this command writes.\n" in said
        )
    only_figures = (command(*job, "--no-helps", "--json"), command(*run, "--no-helps", "--json"))
    for said in only_figures:
        assert (said.json["bottleneck"], said.json["helps"]) == (None, [])
    sentence = predicted.out.partition("What would help\n")[2].partition(":\n")[0]
    assert sentence in page.read_text(encoding="utf-8")
