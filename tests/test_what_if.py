"""Savings of a change: replays of recorded runs, against the same change made for real on the virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import SIMULATE, refused
from moesched.analysis.explanation import explain
from moesched.analysis.replayed_run import replay_recording, without_loading
from moesched.analysis.run_changes import Change
from moesched.analysis.what_if import changed_works, what_if
from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.machines.changes import changed
from moesched.plugins import make_policy
from moesched.runs.simulation import simulate
from moesched.trace import About, Recorder, Recording, read_trace, write_trace
from runs import FORTY_PERCENT, make_plan, realtime_run
from tables import table
from traces import by_hand, run_graph, timetable

FIXED = ("layer_streaming", "cgopipe", "flexgen", "flexgen_cpu")
DECIDING = ("expert_cache", "lru_offload", "twiddler")


def simulated(policy: str, change: str | None = None) -> Recording:
    """A run on a T4, or on a changed one."""
    machine = load_machine("t4")
    if change is not None:
        machine = changed(machine, [change])
    chosen, recorder = make_policy(policy), Recorder()
    plan = make_plan(chosen, machine=machine, budgets=FORTY_PERCENT, requests=8, new_tokens=4)
    simulate(plan, chosen, recorder=recorder)
    return recorder.recording()


def seconds(recording: Recording) -> float:
    """The duration of a run without loading."""
    run = without_loading(recording)
    return (run.end - run.start) / 1e9


@pytest.mark.parametrize("policy", [*FIXED, *DECIDING])
def test_a_replay_by_costs_takes_the_time_of_the_run_to_the_nanosecond(policy: str) -> None:
    recording = simulated(policy)
    replayed = replay_recording(recording, works=changed_works(recording, Change()))
    assert timetable(replayed) == timetable(recording)
    [answer] = what_if(recording, ["link host->gpu x1"])
    assert answer.speedup == 1
    assert answer.decisions_unchanged == (policy in DECIDING)


@pytest.mark.parametrize("factor", [0.5, 2, 8])
@pytest.mark.parametrize("policy", FIXED)
def test_a_fixed_graph_on_another_link_takes_the_time_of_a_machine_with_that_link(
    policy: str, factor: float
) -> None:
    [answer] = what_if(simulated(policy), [f"link host->gpu x{factor}"])
    assert answer.seconds == pytest.approx(seconds(simulated(policy, f"link.host->gpu=x{factor}")), rel=0.01)


@pytest.mark.parametrize("policy", DECIDING)
def test_a_policy_that_decides_gets_the_right_sign(policy: str) -> None:
    before = simulated(policy)
    slower, faster = what_if(before, ["link host->gpu x0.5", "link host->gpu x2"])
    assert slower.speedup <= 1 <= faster.speedup
    assert seconds(simulated(policy, "link.host->gpu=x2")) <= seconds(before) * 1.001


def test_kernels_take_a_share_of_their_time_and_hide_behind_what_is_slower() -> None:
    graph = "; ".join(f"link: fetch 1000 writes {page}; gpu: kernel 400 reads {page}" for page in "abcd")
    recording = run_graph(by_hand(graph), ["link", "gpu"], "in_order")
    half, both, slow = what_if(
        recording, ["kernel kernel x0.5", "kernel kernel x0.5, kernel fetch x0.5", "link link x0.5"]
    )
    assert half.seconds == pytest.approx(4200e-9)
    assert both.seconds == pytest.approx(2200e-9)
    assert slow.seconds == pytest.approx(8400e-9)


def test_without_handovers_a_measured_run_takes_the_time_of_its_tasks() -> None:
    run = realtime_run("cgopipe", budgets=FORTY_PERCENT)
    [answer] = what_if(run.recording, ["no handovers"])
    assert answer.speedup > 1.5


def test_a_trace_carries_the_costs_of_a_prediction(tmp_path: Path) -> None:
    recording = simulated("cgopipe")
    write_trace(tmp_path / "trace.json", recording, About(driver="virtual"))
    read = read_trace(tmp_path / "trace.json").recording
    assert read.costs == recording.costs
    assert what_if(read, ["link host->gpu x2"]) == what_if(recording, ["link host->gpu x2"])


@pytest.mark.parametrize(("change", "told"), table("broken_files.md", "Changes of a run"))
def test_a_change_of_nothing_is_refused(change: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        what_if(simulated("cgopipe"), [change])


def test_the_command_answers_several_changes(command: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command(*SIMULATE, "--policy", "expert_cache", "--batch-size", 2, "--gen", 3, "--trace", trace)
    changes = ("--what-if", "link host->gpu x2", "--what-if", "kernel run_expert x0.5, no handovers")
    said = command("explain", trace, *changes)
    assert "kernel run_expert x0.5, no handovers" in said.out
    assert "its decisions were held" in said.out
    answers = command("explain", trace, *changes, "--json").json["what_if"]
    assert [answer["change"] for answer in answers] == [
        "link host->gpu x2",
        "kernel run_expert x0.5, no handovers",
    ]
    assert answers[0].keys() == {"change", "seconds", "speedup", "decisions_unchanged"}
    refused(command("explain", trace, "--what-if", "link disk x2"), "has no lane 'disk'")


def test_an_explanation_has_the_answers_that_were_asked_for() -> None:
    recording = simulated("cgopipe")
    told = explain(recording, About(driver="virtual"), ["link host->gpu x2"])
    assert told.what_if == what_if(recording, ["link host->gpu x2"])
