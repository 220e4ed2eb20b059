"""Values as notebooks show them: one short line as text, and HTML with figures, the bottleneck and a timeline."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

import moesched
from moesched.analysis.comparison import Comparison
from moesched.analysis.timeline import Window, timeline_of
from moesched.planner.proposal import Proposal, plan_model
from moesched.plugins import make_policy
from moesched.report.cell_drawings import timeline_drawing
from moesched.steps.plan import Plan
from moesched.trace import About, Recording
from moesched.trace.chrome_reader import Trace
from report_pages import PageElements
from runs import FORTY_PERCENT, make_plan, virtual_run


class Values(NamedTuple):
    """One of each kind, of small runs."""

    report: moesched.JobReport
    trace: Trace
    recording: Recording
    comparison: Comparison
    proposal: Proposal
    plan: Plan


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Values:
    folder = tmp_path_factory.mktemp("traces")
    traces = [folder / "a.json", folder / "b.json"]
    report, _ = (
        moesched.simulate_model(
            "mixtral-0.8b", machine="t4", policy=policy, workload=[[1]] * 2, gen=2, trace=trace
        )
        for policy, trace in zip(("cgopipe", "expert_streaming"), traces, strict=True)
    )
    trace = moesched.read_trace(traces[0])
    return Values(
        report=report,
        trace=trace,
        recording=trace.recording,
        comparison=moesched.compare_runs(traces),
        proposal=plan_model("mixtral-0.8b", machine="t4", gen=2, policy="resident", objective="latency"),
        plan=make_plan(make_policy("cgopipe"), budgets=FORTY_PERCENT),
    )


def test_every_value_is_a_short_line_as_text(values: Values) -> None:
    for name, value in values._asdict().items():
        assert re.fullmatch("<.{1,198}", repr(value)), name
    assert f"{values.report.throughput_tokens_per_second:,.1f} tokens/s" in repr(values.report)
    assert "cgopipe on mixtral-0.8b, predicted on t4" in repr(values.report)
    page = values.plan.layout.expert(1, 3)[0]
    assert repr(page) == f"<Page L1 E3 #0: {page.nbytes:,} bytes>"


def test_every_value_is_html_with_what_matters_of_it(values: Values) -> None:
    lanes = {each.lane.name for each in values.trace.recording.slices if each.step == 1}
    report, trace, plan = values.report, values.trace, values.plan
    shown: list[tuple[Any, list[str]]] = [
        (report, ["Bottleneck: "]),
        (replace(report, trace="gone.json"), ["Busiest lane: "]),
        (trace, ["Bottleneck: ", *lanes]),
        (Trace(Recording([], [], [], []), trace.about), ["No task ran."]),
        (plan, [*plan.memories, *(pool.name for pool in plan.weights.pools)]),
        (values.proposal, ["resident"]),
        (values.comparison, [values.comparison.reasons()[0]]),
    ]
    for value, texts in shown:
        assert [text for text in texts if text not in PageElements(value._repr_html_()).text] == []
    for value in (report, trace):
        assert PageElements(value._repr_html_()).find("svg"), "a timeline"


def test_a_report_shows_its_figures_and_its_busiest_lane(values: Values) -> None:
    report = replace(values.report, trace=None)
    page = PageElements(report._repr_html_())
    busiest = max(report.lanes, key=lambda name: report.lanes[name].busy_seconds)
    assert f"{report.decode_tokens_per_second:,.1f} tokens/s" in page.text
    assert f"Busiest lane: {busiest}, " in page.text
    assert "measured" not in page.text


def test_a_long_timeline_stays_small() -> None:
    recording = virtual_run("cgopipe", requests=64).recording
    whole = timeline_of(recording, Window(0, recording.end))
    assert len(recording.slices) > 2_000
    assert len(timeline_drawing(whole)) < 100_000


def test_names_cannot_add_elements(values: Values) -> None:
    about = About(driver="virtual", policy="<script>alert(1)</script>")
    page = PageElements(Trace(values.trace.recording, about)._repr_html_())
    assert not page.find("script")
    assert "<script>" in page.text


def test_the_version_is_that_of_the_package() -> None:
    assert moesched.__version__ == version("moesched")
