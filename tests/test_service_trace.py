"""The trace of a server: its last steps, and the requests that were answered meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesched.analysis.explanation import explain
from moesched.errors import BadInput
from moesched.jobs.served_model import served_model
from moesched.jobs.served_options import ServedOptions
from moesched.jobs.service_trace import RequestSpans, write_service_trace
from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.runs.planning import plan_run
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import simulate_serving
from moesched.runs.service_report import RunNames
from moesched.runs.serving import Serving, ServingListener
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.capacity import Capacity
from moesched.serving.request import Request
from moesched.trace import About, LastSteps, Recorder, check_trace, read_trace, summarize
from small_models import SMALL, small_model

CAPACITY = Capacity(2, 3, 6 * 16, 24, 32)


def asked(count: int, apart: int = 0) -> list[Request]:
    """Requests of four tokens each, some time after each other."""
    return [
        Request(number=number, prompt=4, new_tokens=4, arrives=number * apart, ids=[number, 1, 2, 3])
        for number in range(count)
    ]


def test_a_server_writes_its_steps_and_requests_when_it_ends(tmp_path: Path) -> None:
    trace = tmp_path / "served.json.gz"
    given = ServedOptions(
        model=small_model(tmp_path / "small"), policy="resident", context=64, batch_size=4, trace=trace
    )
    with served_model(given) as model:
        model.serve(ListedArrivals(asked(6)))
    assert check_trace(trace) == []
    read = read_trace(trace)
    assert (read.about.driver, read.about.model, read.about.policy) == ("realtime", "small", "resident")
    spans = read.recording.requests
    assert [(span.request, span.tokens) for span in spans] == [(number, 4) for number in range(6)]
    ends = [each.end for each in read.recording.slices]
    assert all(span.arrived <= span.entered < span.first_token < span.ended for span in spans)
    assert max(span.ended for span in spans) <= max(ends)


class Fails(ServingListener):
    """A listener that fails at the third step."""

    def step(self, serving: Serving) -> None:
        if serving.steps == 3:
            raise ValueError("the third step")


def test_a_server_that_fails_leaves_the_trace_of_the_steps_before(tmp_path: Path) -> None:
    trace = tmp_path / "served.json"
    given = ServedOptions(model=small_model(tmp_path / "small"), policy="resident", context=64, trace=trace)
    with served_model(given) as model, pytest.raises(ValueError, match="the third step"):
        model.serve(ListedArrivals(asked(6)), Fails())
    assert check_trace(trace) == []
    assert {0, 1, 2} <= {each.step for each in read_trace(trace).recording.slices}


class Moves(Fails):
    """A listener that fails, too, after the folder of the trace went away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def loaded(self, serving: Serving) -> None:
        self._folder.rmdir()


def test_a_trace_that_cannot_be_written_does_not_hide_why_the_server_failed(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    given = ServedOptions(
        model=small_model(tmp_path / "small"), policy="resident", context=64, trace=folder / "served.json"
    )
    with served_model(given) as model, pytest.raises(ValueError, match="the third step"):
        model.serve(ListedArrivals(asked(6)), Moves(folder))


def test_a_long_run_leaves_its_last_steps_and_what_was_answered_in_them(tmp_path: Path) -> None:
    policy, recorder, spans = make_policy("cgopipe"), LastSteps(3), RequestSpans(None)
    plan = plan_run(load_machine("t4"), weight_layout(SMALL), CAPACITY.fullest(), policy)
    arrivals = ListedArrivals(asked(5, apart=100_000_000))
    setup = ServingSetup(plan, policy, CAPACITY, arrivals, listener=spans, keeps_history=False)
    serving = simulate_serving(setup, recorder=recorder)
    ran = RunNames("small", "t4", "cgopipe", "bfloat16", measured=False)
    rate = spans.tokens_per_second
    write_service_trace(tmp_path / "trace.json", recorder, spans.ended, ran, CAPACITY, plan, rate)
    assert check_trace(tmp_path / "trace.json") == []
    recording, about = read_trace(tmp_path / "trace.json")
    assert (
        about.tokens_per_second
        == rate
        == sum(span.tokens for span in spans.ended) / (spans.ended[-1].ended - serving.loaded) * 1e9
    )
    last = serving.steps - 1
    assert {each.step for each in recording.slices} == {last - 2, last - 1, last}
    assert len(spans.ended) == 5
    assert [span.request for span in recording.requests] == [4]


def test_the_time_until_a_request_arrives_is_part_of_its_first_step_and_stays_in_a_what_if() -> None:
    policy, recorder = make_policy("cgopipe"), Recorder()
    plan = plan_run(load_machine("t4"), weight_layout(SMALL), CAPACITY.fullest(), policy)
    arrivals = ListedArrivals(asked(3, apart=100_000_000))
    simulate_serving(ServingSetup(plan, policy, CAPACITY, arrivals), recorder=recorder)
    recording = recorder.recording()
    steps = summarize(recording).steps
    assert [each.step for each in steps if each.seconds > 0.05] == [4, 8]
    assert all(each.seconds > 0 for each in steps)
    told = explain(recording, About(driver="virtual"), ["link host->gpu x2"])
    assert 1 < told.what_if[0].speedup < 1.1
    assert not any("wait" in each.change for each in told.helps)


def test_costs_say_what_tasks_share_on_a_machine_on_which_they_slow_each_other_down() -> None:
    policy, recorder = make_policy("expert_cache"), Recorder()
    plan = plan_run(load_machine("m2-ultra"), weight_layout(SMALL), CAPACITY.fullest(), policy)
    simulate_serving(ServingSetup(plan, policy, CAPACITY, ListedArrivals(asked(1))), recorder=recorder)
    assert any(cost.shares for cost in recorder.recording().costs.values())


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "small")
    for trace in (tmp_path / "missing" / "trace.json", folder / "trace.json"):
        with pytest.raises(BadInput, match=f"cannot write trace {trace}"):
            with served_model(ServedOptions(model=folder, trace=trace)):
                pass
